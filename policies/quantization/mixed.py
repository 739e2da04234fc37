"""Weights in 8 bits, in 4 or as stored, by patterns of their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from headrace.policies.quantization.integers import PLAIN_SCHEMES
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

Form = Literal["int8", "int4", "none"]
_SCHEMES: Mapping[str, str | None] = {"int8": INT8_SCHEME, "int4": INT4_SCHEME, "none": None}


def _default_weights() -> dict[str, Form]:
    return {"*embed_tokens.weight": "int8", "*lm_head.weight": "int8", "*": "int4"}


class Mixed:
    name: ClassVar[str] = "mixed"

    @dataclass(frozen=True, slots=True)
    class Options:
        """Which weights get how many bits."""

        weights: dict[str, Form] = field(default_factory=_default_weights)
        """Pattern of a tensor's name -> int8, int4 or none; the first that matches decides, no match: none."""
        group_size: int = BLOCK
        """A multiple of 32, or -1: a whole row."""

        def __post_init__(self) -> None:
            check_group_size(self.group_size)
            if not self.weights:
                raise ValueError("weights must name at least one pattern, such as '*': int4")

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        """ValueError where the rows do not come out even in groups."""
        if stored_as not in PLAIN_SCHEMES or len(shape) != 2:
            return None
        patterns = self._options.weights.items()
        form = next((f for p, f in patterns if fnmatch.fnmatchcase(tensor_name, p)), "none")
        if form != "none":
            check_width(tensor_name, shape[1], self._options.group_size)
        return _SCHEMES[form]

    def quantize(
        self,
        weight: NDArray[np.float32],
        scheme: str,
        statistics: Mapping[str, NDArray[np.float32]] | None,
    ) -> Mapping[str, QuantizedPart]:
        return ROUNDING[scheme](weight, self._options.group_size)
