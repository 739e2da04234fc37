"""The KV pool in torch tensors: keys and values per layer, and their scales where the storage is 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.errors import ConfigError
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The code of a row's largest element, where a row has a scale."""
ZeroPlane = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape, dtype) -> zeros where the pool shall be."""


@dataclass(slots=True)
class KVLayer:
    """One layer's storage. Mutable: `bias` is set by whoever compacts."""

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # the same
    group: int
    key_scale: torch.Tensor | None = None  # [num_blocks, block_size, num_kv_heads] f32
    value_scale: torch.Tensor | None = None  # the same
    bias: torch.Tensor | None = None  # the same

    def planes(self) -> list[torch.Tensor]:
        """Everything that belongs to a block."""
        planes = (self.keys, self.values, self.key_scale, self.value_scale, self.bias)
        return [plane for plane in planes if plane is not None]


def kv_dtype_of(name: str, dtypes: Mapping[str, torch.dtype], owner: str) -> torch.dtype:
    """Return the storage type. ConfigError, in `owner`'s name, where it has none of that name."""
    if name not in dtypes:
        raise ConfigError(
            f"{owner} stores keys and values in {', '.join(dtypes)}; kv_dtype is {name!r}; "
            "write kv_dtype: auto"
        )
    return dtypes[name]


def bytes_per_block(groups: Sequence[KVGroupSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return what one block takes in all layers of all groups; a scale is 4 bytes per head and row."""
    scale = 4 if dtype in LARGEST else 0
    return sum(
        2 * block_size * len(g.layers) * g.num_kv_heads * (g.head_dim * dtype.itemsize + scale)
        for g in groups
    )


class KVPool:
    """All layers of one model."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        zero_plane: ZeroPlane,
    ) -> None:
        self.block_size = block_size
        self.layers: dict[int, KVLayer] = {}
        for index, group in enumerate(groups):
            rows = (num_blocks, block_size, group.num_kv_heads)
            shape = (*rows, group.head_dim)
            for layer in group.layers:
                kv = KVLayer(zero_plane(shape, dtype), zero_plane(shape, dtype), index)
                if dtype in LARGEST:
                    kv.key_scale = zero_plane(rows, torch.float32)
                    kv.value_scale = zero_plane(rows, torch.float32)
                self.layers[layer] = kv

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) in every plane, one pair after the other."""
        for plane in self._planes():
            bits = plane.view(torch.uint8)
            for source, target in pairs:
                bits[target].copy_(bits[source])

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values [n, num_kv_heads, head_dim] f32 of these slots."""
        kv = self.layers[layer]
        chosen = torch.tensor(list(slots), dtype=torch.int64, device=kv.keys.device)
        keys = gather_rows(kv.keys, kv.key_scale, chosen)
        return keys.cpu().numpy(), gather_rows(kv.values, kv.value_scale, chosen).cpu().numpy()

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Write keys and values [n, num_kv_heads, head_dim], quantized per row where the pool is."""
        kv = self.layers[layer]
        chosen = torch.tensor(list(slots), dtype=torch.int64, device=kv.keys.device)
        for plane, scale, rows in (
            (kv.keys, kv.key_scale, keys),
            (kv.values, kv.value_scale, values),
        ):
            numbers = torch.tensor(rows).to(chosen.device)
            if scale is not None:
                numbers, scales = quantize_rows(numbers, plane.dtype)
                scale.flatten(0, 1)[chosen] = scales
            plane.flatten(0, 1)[chosen] = numbers.to(plane.dtype)

    def _planes(self) -> Iterable[torch.Tensor]:
        return (plane for layer in self.layers.values() for plane in layer.planes())


def gather_rows(
    plane: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """Return rows [n, heads, head_dim] f32 of a plane of keys or values."""
    rows = plane.flatten(0, 1)
    # torch does not index 8-bit floats everywhere; their bits it does
    bits = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    numbers = bits[slots].view(rows.dtype).float()
    return numbers if scale is None else numbers * scale.flatten(0, 1)[slots][..., None]


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (rounded to nearest, ties to even) and scales [..., 1 less] so that code * scale is the row.

    The scale is the row's largest magnitude over the largest code; a row of zeros has scale 0.
    """
    largest = rows.abs().amax(dim=-1)
    scales = largest * (1.0 / LARGEST[dtype])
    codes = rows * (LARGEST[dtype] / torch.where(largest == 0, 1.0, largest))[..., None]
    codes = codes.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales
