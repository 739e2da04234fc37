"""Linear weights on a device: plain rows that torch multiplies, or codes in groups of 32 for small products.

The vocabulary's matrix is embedding and output at once and is kept plain; its products are f32, as a
rounded logit would make ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.gpu.kernels import QuantizedWeight
from headrace.errors import ModelError
from headrace.types import WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAIN = frozenset({"f32", "f16", "bf16"})
QUANTIZED = frozenset({"q8_0", "q4_1"})
SCHEMES = PLAIN | QUANTIZED
GROUP = 32
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", GROUP)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", GROUP // 2)])


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Rows [out, in] in the activations' type."""

    rows: torch.Tensor
    bias: torch.Tensor | None  # [out], the same type
    is_vocabulary: bool

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)


Weight = DenseWeight | QuantizedWeight


def hold_weight(
    parts: Sequence[WeightPart],
    bias: NDArray[np.float32] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Weight:
    """Return the device's form of parts stacked along out. Each part is taken once, in order.

    Parts of one block scheme stay codes; a mixture, and the vocabulary, become plain rows of `dtype`.
    ModelError names a part whose scheme is not known here.
    """
    first = parts[0]
    is_vocabulary = first.name.endswith(VOCABULARY)
    offset = None if bias is None else torch.tensor(bias, device=device)
    keeps_codes = (
        first.scheme in QUANTIZED
        and not is_vocabulary
        and all(parts[index].scheme == first.scheme for index in range(1, len(parts)))
    )
    if keeps_codes:
        held = [_codes(parts[index], device) for index in range(len(parts))]
        codes, scales, minima = zip(*held, strict=True)
        return QuantizedWeight(
            torch.cat(codes),
            torch.cat(scales),
            torch.cat(minima) if first.scheme == "q4_1" else None,
            offset,
            first.shape[1],
        )
    rows = torch.cat([_plain_rows(parts[index], dtype, device) for index in range(len(parts))])
    return DenseWeight(rows, None if offset is None else offset.to(dtype), is_vocabulary)


def bytes_of(weight: Weight) -> int:
    """Return what a weight takes on the device."""
    if isinstance(weight, DenseWeight):
        return weight.num_bytes
    tensors = (weight.codes, weight.scales, weight.minima, weight.bias)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def dense_rows(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Expand codes to rows [out, in], for products of many rows of x."""
    codes = weight.codes
    if weight.minima is not None:
        halves = codes.view(len(codes), -1, GROUP // 2)
        codes = torch.cat((halves & 15, halves >> 4), dim=2)
    groups = codes.view(len(codes), -1, GROUP).float() * weight.scales.float()[..., None]
    if weight.minima is not None:
        groups += weight.minima.float()[..., None]
    return groups.view(len(codes), weight.in_size).to(dtype)


def _codes(
    part: WeightPart, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    out_size, in_size = part.shape
    blocks = np.ascontiguousarray(part.data).view(_Q8_0 if part.scheme == "q8_0" else _Q4_1)
    blocks = blocks.reshape(out_size, in_size // GROUP)

    def field(name: str) -> torch.Tensor:
        return torch.tensor(blocks[name].reshape(out_size, -1), device=device)

    return field("codes"), field("scale"), field("minimum") if part.scheme == "q4_1" else None


def _plain_rows(part: WeightPart, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if part.scheme in QUANTIZED:
        codes, scales, minima = _codes(part, device)
        return dense_rows(QuantizedWeight(codes, scales, minima, None, part.shape[1]), dtype)
    if part.scheme not in PLAIN:
        raise ModelError(
            f"tensor '{part.name}' is stored as {part.scheme}; a GPU backend takes "
            f"{', '.join(sorted(SCHEMES))} and expects other schemes expanded"
        )
    data: NDArray[Any] = np.ascontiguousarray(part.data)
    rows = torch.tensor(data.view(np.int16) if part.scheme == "bf16" else data, device=device)
    return (rows.view(torch.bfloat16) if part.scheme == "bf16" else rows).view(part.shape).to(dtype)
