"""Loads cubins through CuPy and launches them with prepared argument blocks on torch's current stream.

Implements headrace.backends.gpu.device.Launcher. The driver is called directly: CuPy's own argument handling
costs several times the launch, and knows neither bf16 nor fp8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.cupy_raw.compiling import cached_kernels

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Dimensions

DEFAULT_SHARED_BYTES = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def argument_bytes(value: Any) -> bytes:
    """Return a kernel argument as the device reads it: an address, or the scalar's own bytes."""
    if value is None:
        return bytes(8)
    if isinstance(value, torch.Tensor):
        return int(value.data_ptr()).to_bytes(8, "little")
    if isinstance(value, np.generic):
        return value.tobytes()
    raise TypeError(
        f"a kernel's argument is a tensor, None or a NumPy scalar, not {type(value).__name__}"
    )


class CupyKernel:
    """One loaded kernel. Mutable: how much shared memory the driver has allowed it."""

    def __init__(self, function: Any, driver: Any) -> None:
        self._function = function
        self._driver = driver
        self._allowed_shared = DEFAULT_SHARED_BYTES

    def __call__(
        self, grid: Dimensions, block: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        pointer = self._function.ptr
        if shared_bytes > self._allowed_shared:
            self._driver.funcSetAttribute(pointer, _MAX_DYNAMIC_SHARED, shared_bytes)
            self._allowed_shared = shared_bytes
        held = [
            ctypes.create_string_buffer(data, len(data)) for data in map(argument_bytes, arguments)
        ]
        block_of = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        stream = torch.cuda.current_stream().cuda_stream
        self._driver.launchKernel(
            pointer, *grid, block, 1, 1, shared_bytes, stream, ctypes.addressof(block_of), 0
        )


class CupyLauncher:
    """Compiles, loads and keeps kernels for one architecture."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], CupyKernel] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int | str]) -> CupyKernel:
        key = (source, tuple(sorted(defines.items())))
        found = self._kernels.get((key, name))
        if found is None:
            from cupy.cuda import driver, function

            if key not in self._modules:
                module = function.Module()
                module.load(cached_kernels(source, defines, self._architecture))
                self._modules[key] = module
            found = CupyKernel(self._modules[key].get_function(name), driver)
            self._kernels[key, name] = found
        return found
