"""The forms in which this backend holds a linear weight, made piece by piece.

`PackedWeight` is oneDNN's own order, fast at every number of rows but opaque. `RowsWeight` is plain
rows, a view of the mapped file where that is stored in the right dtype: for the vocabulary's matrix (it is
embedding and output at once, and its products stay f32), for `deterministic`, and without oneDNN.

The 120 products of SmolLM2 on Zen 5, 2 threads, ms at 1 / 4 / 16 / 64 / 256 rows: packed bf16 4.7 /
5.4 / 8.2 / 19 / 60; plain bf16 10.6 / 12 / 16 / 32 / 74; packed f32 7.7 / 8.4 / 14 / 37 / 116; plain f32
24 / 35 / 46 / 104 / 304; torch's int8pack 3.9 / 3.9 / 14 / 46 / 175; its int4pack 2.5 / 3.4 / 11 / 41 / 157.
One form that is best or close from 4 rows on was taken over a second copy that gains 2 ms below.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.cpu.kv_pool import zero_plane
from headrace.errors import ModelError
from headrace.types import WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LONGEST_F32_SUM = 1024
ROW_STEP = 16
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Canonical names of matrices whose rows are tokens."""


@dataclass(frozen=True, slots=True)
class RowsWeight:
    """Rows [out, in] in f32, bf16 or f16."""

    rows: torch.Tensor
    bias: torch.Tensor | None  # [out] f32

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in oneDNN's order."""

    packed: torch.Tensor
    bias: torch.Tensor | None  # [out], the weight's dtype
    num_bytes: int


def can_pack(dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies packed weights of this dtype here, by doing it once."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        weight = torch.ones(32, 32, dtype=dtype)
        product = packed_linear(weight[:1], pack(weight), None)
    except (RuntimeError, AttributeError):
        return False
    return bool((product == 32).all())


def pack(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in the order oneDNN wants for about 16 rows of x (the order for 1 is the same)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(rows, 16)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply. oneDNN compiles and keeps code of some 0.3 MB for every number of rows it meets, so it
    meets few: the others are filled up.
    """
    num_rows = len(x)
    num_filled = filled_rows(num_rows)
    if num_filled > num_rows:
        filled = x.new_empty(num_filled, x.shape[1])
        filled[:num_rows] = x
        filled[num_rows:] = 0
        x = filled
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:num_rows]


def filled_rows(num_rows: int) -> int:
    """Return the number to fill up to: powers of two to 16, then 32, 48, 64, 96, 128, 192, 256, 384, ..."""
    power = 1 << (num_rows - 1).bit_length()
    if power <= ROW_STEP:
        return power
    step = max(ROW_STEP, power // 4)
    return -(-num_rows // step) * step


def has_long_sums(rows: torch.Tensor) -> bool:
    """Say whether oneDNN would lose what float32 is chosen for: it adds a row's products one by one.

    With the outliers that a trained model's activations have, its down projections (1,536 long) moved a
    logit of 36 by 1.2e-3, and rows summed in 16 lanes by 2e-4.
    """
    return rows.dtype == torch.float32 and rows.shape[1] > LONGEST_F32_SUM


def is_vocabulary(name: str) -> bool:
    return name.endswith(VOCABULARY)


def part_rows(part: WeightPart) -> torch.Tensor:
    """View a plain part as a tensor [out, in]. ModelError names a part that was not expanded."""
    if part.scheme not in PLAIN:
        raise ModelError(
            f"tensor '{part.name}' is stored as {part.scheme}; backend 'cpu' takes {', '.join(PLAIN)} "
            "and expects other schemes expanded"
        )
    return _tensor_of(part.data, PLAIN[part.scheme]).view(part.shape)


def gather_rows(parts: Sequence[WeightPart], dtype: torch.dtype) -> torch.Tensor:
    """Return all parts stacked, [out, in] in `dtype`: the stored rows themselves where they allow it.

    Parts of one matrix are equal but for the last, so that room for `len(parts)` of the first is
    nearly always enough; what stays unwritten takes no memory.
    """
    first = part_rows(parts[0])
    if len(parts) == 1:
        return first if first.dtype == dtype and first.is_contiguous() else first.to(dtype)
    stacked = zero_plane((len(parts) * first.shape[0], first.shape[1]), dtype)
    num_rows = 0
    for index in range(len(parts)):
        rows = first if index == 0 else part_rows(parts[index])
        first = rows
        if num_rows + len(rows) > len(stacked):
            larger = zero_plane((2 * (num_rows + len(rows)), rows.shape[1]), dtype)
            larger[:num_rows] = stacked[:num_rows]
            stacked = larger
        stacked[num_rows : num_rows + len(rows)] = rows
        num_rows += len(rows)
    return stacked[:num_rows]


def _tensor_of(data: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """View an array as a tensor without a copy. Mapped files are read-only, which torch cannot say."""
    plain = data if data.flags.c_contiguous else np.ascontiguousarray(data)
    address = int(plain.__array_interface__["data"][0])
    if plain.size == 0 or address % dtype.itemsize:
        return torch.tensor(plain.reshape(-1).view(np.uint8)).view(dtype)
    memory = (ctypes.c_ubyte * plain.nbytes).from_address(address)
    memory.array = plain  # type: ignore[attr-defined]  # keeps it alive as long as the tensor
    return torch.frombuffer(memory, dtype=dtype)
