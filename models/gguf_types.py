"""GGML's tensor types: their numbers in a file, block sizes, and which of them Headrace reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a type stores a row: `block_bytes` for every `block_size` elements."""

    scheme: str
    block_size: int
    block_bytes: int


BLOCK_FORMATS: Mapping[int, BlockFormat] = MappingProxyType(
    {
        0: BlockFormat("f32", 1, 4),
        1: BlockFormat("f16", 1, 2),
        30: BlockFormat("bf16", 1, 2),
        2: BlockFormat("q4_0", 32, 18),
        3: BlockFormat("q4_1", 32, 20),
        6: BlockFormat("q5_0", 32, 22),
        7: BlockFormat("q5_1", 32, 24),
        8: BlockFormat("q8_0", 32, 34),
        12: BlockFormat("q4_k", 256, 144),
        13: BlockFormat("q5_k", 256, 176),
        14: BlockFormat("q6_k", 256, 210),
    }
)
"""Type number -> format, for every type Headrace reads."""

FORMAT_OF_SCHEME: Mapping[str, BlockFormat] = MappingProxyType(
    {block_format.scheme: block_format for block_format in BLOCK_FORMATS.values()}
)
SUPPORTED_TYPES = ", ".join(block_format.scheme.upper() for block_format in BLOCK_FORMATS.values())

_OTHER_TYPES: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
    }
)


def type_name(number: int) -> str:
    """Return the name of a tensor type as GGML spells it, also of types Headrace cannot read."""
    known = BLOCK_FORMATS.get(number)
    if known is not None:
        return known.scheme.upper()
    return _OTHER_TYPES.get(number, f"number {number}")
