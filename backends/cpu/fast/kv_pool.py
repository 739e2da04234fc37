"""The KV pool of the fast path: bf16 in the order that kernels_attend reads, resident only where written.

A plane is [num_blocks, num_kv_heads, block_size / 16, ...]; `write_rows` and `read_rows` translate to rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast.arena import address, map_pages
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LayerPlanes:
    """One layer's keys [N, H, S, D / 2, 16, 2] and values [N, H, S, D / 16, 8, 16, 2], bf16 as u2."""

    keys: NDArray[np.uint16]
    values: NDArray[np.uint16]


def bytes_per_block(groups: Sequence[KVGroupSpec], block_size: int) -> int:
    elements = sum(len(g.layers) * g.num_kv_heads * g.head_dim for g in groups)
    return 2 * block_size * elements * 2


class FastKVPool:
    """All layers of one model."""

    def __init__(self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._layers: dict[int, LayerPlanes] = {}
        for group in groups:
            shape = (num_blocks, group.num_kv_heads, block_size // LANES)
            for layer in group.layers:
                self._layers[layer] = LayerPlanes(
                    _plane((*shape, group.head_dim // 2, LANES, 2)),
                    _plane((*shape, group.head_dim // LANES, LANES // 2, LANES, 2)),
                )

    def addresses(self) -> NDArray[np.int64]:
        """Return [layers, 2]: where each layer's keys and values are."""
        table = np.zeros((max(self._layers, default=-1) + 1, 2), np.int64)
        for layer, planes in self._layers.items():
            table[layer] = address(planes.keys), address(planes.values)
        return table

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for planes in self._layers.values():
            for source, target in pairs:
                planes.keys[target] = planes.keys[source]
                planes.values[target] = planes.values[source]

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values [n, num_kv_heads, head_dim] f32."""
        planes = self._layers[layer]
        block, part, row = self._split(slots)
        keys = planes.keys[block, :, part, :, row, :]  # [n, H, D / 2, 2]
        values = planes.values[block, :, part, :, row // 2, :, row % 2]  # [n, H, D / 16, 16]
        count, heads = len(block), planes.keys.shape[1]
        return (
            _widen(keys.reshape(count, heads, -1)),
            _widen(values.reshape(count, heads, -1)),
        )

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        planes = self._layers[layer]
        block, part, row = self._split(slots)
        count, heads = len(block), planes.keys.shape[1]
        planes.keys[block, :, part, :, row, :] = _round(keys).reshape(count, heads, -1, 2)
        values_of = _round(values).reshape(count, heads, -1, LANES)
        planes.values[block, :, part, :, row // 2, :, row % 2] = values_of

    def _split(
        self, slots: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        chosen = np.asarray(list(slots), np.int64)
        inside = chosen % self.block_size
        return chosen // self.block_size, inside // LANES, inside % LANES


def _plane(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Zeros without huge pages: a block that is written must not make its neighbours resident."""
    count = int(np.prod(shape))
    return map_pages(2 * count, huge=False)[: 2 * count].view(np.uint16).reshape(shape)


def _widen(rows: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (rows.astype(np.uint32) << 16).view(np.float32)


def _round(rows: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round f32 to bf16, to even; NaN stays NaN."""
    plain = np.ascontiguousarray(rows, np.float32)
    bits = plain.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(plain), 0x7FC0, rounded).astype(np.uint16)
