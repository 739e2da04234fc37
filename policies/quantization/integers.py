"""Weights in 8 or in 4 bits, made at load from what a checkpoint stores as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headrace.policies.quantization.rounding import (
    BLOCK,
    INT4_SCHEME,
    INT8_SCHEME,
    ROUNDING,
    check_group_size,
    check_width,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.interfaces import QuantizedPart

PLAIN_SCHEMES = frozenset({"f32", "f16", "bf16"})


class Integers:
    """What `int8` and `int4` share: every matrix of plain numbers, in one scheme."""

    scheme: ClassVar[str]

    @dataclass(frozen=True, slots=True)
    class Options:
        """How many inputs share a scale."""

        group_size: int = BLOCK
        """A multiple of 32, or -1: a whole row."""

        def __post_init__(self) -> None:
            check_group_size(self.group_size)

    def __init__(self, options: Options | None = None) -> None:
        self._group_size = (options or self.Options()).group_size

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        """ValueError where the rows do not come out even in groups."""
        if stored_as not in PLAIN_SCHEMES or len(shape) != 2:
            return None
        check_width(tensor_name, shape[1], self._group_size)
        return self.scheme

    def quantize(
        self,
        weight: NDArray[np.float32],
        scheme: str,
        statistics: Mapping[str, NDArray[np.float32]] | None,
    ) -> Mapping[str, QuantizedPart]:
        return ROUNDING[scheme](weight, self._group_size)


class Int8(Integers):
    name: ClassVar[str] = "int8"
    scheme = INT8_SCHEME


class Int4(Integers):
    name: ClassVar[str] = "int4"
    scheme = INT4_SCHEME
