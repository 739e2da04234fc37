"""What a kernel factory returns, and the storage formats that kernels are specialised for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FULL_WARP = 0xFFFFFFFF
F32, BF16, F16, FP8, INT8 = "f32", "bf16", "f16", "fp8", "int8"
VECTOR = {F32: 4, BF16: 8, F16: 8, FP8: 16, INT8: 16}
"""Elements in 16 bytes."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A function to be compiled: pointers are CPointer types, so that launches pass bare addresses."""

    function: Callable[..., None]
    signature: Any
    """numba.cuda.types signature; its return type is void."""
    num_threads: int
    """Threads of a block: what it is compiled for and launched with."""
    shared_bytes: int = 0
    """Dynamic shared memory it is launched with."""


def power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()
