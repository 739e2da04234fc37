"""The KV pool of the fast path, in the order that kernels_attend_rows reads, resident only where written.

A plane is [num_blocks, num_kv_heads, block_size / 16, ...]; `write_rows` and `read_rows` translate to rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast.arena import address, map_pages
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS, block_bytes
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMS: Mapping[str, int] = {"bfloat16": PAIRS, "int8": CODES}
"""`kv_dtype` to how rows are kept."""


@dataclass(frozen=True, slots=True)
class LayerPlanes:
    """One layer's keys and values, u1 [N, H, S, block_bytes]: a block of 16 rows is one run of bytes."""

    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    head_dim: int


def bytes_per_block(groups: Sequence[KVGroupSpec], block_size: int, form: int) -> int:
    """Return what a block of the engine's takes in all groups and layers, keys and values."""
    runs = block_size // LANES
    return sum(
        2 * len(g.layers) * g.num_kv_heads * runs * block_bytes(g.head_dim, form) for g in groups
    )


class FastKVPool:
    """All layers of one model."""

    def __init__(
        self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, form: int
    ) -> None:
        self.block_size = block_size
        self.form = form
        self._layers: dict[int, LayerPlanes] = {}
        for group in groups:
            runs = (num_blocks, group.num_kv_heads, block_size // LANES)
            shape = (*runs, block_bytes(group.head_dim, form))
            for layer in group.layers:
                self._layers[layer] = LayerPlanes(_plane(shape), _plane(shape), group.head_dim)

    def addresses(self) -> NDArray[np.int64]:
        """Return [layers, 2]: where each layer's keys and values are."""
        table = np.zeros((max(self._layers, default=-1) + 1, 2), np.int64)
        for layer, planes in self._layers.items():
            table[layer] = address(planes.keys), address(planes.values)
        return table

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) byte for byte."""
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
        count, heads = len(block), planes.keys.shape[1]
        if self.form == PAIRS:
            all_keys, all_values = _pairs(planes)
            keys = _widen(all_keys[block, :, part, :, row, :])  # [n, H, D / 2, 2]
            values = _widen(all_values[block, :, part, :, row // 2, :, row % 2])
        else:
            key_codes, value_codes = _codes(planes)
            scales = [_scales(plane)[block, :, part, row] for plane in (planes.keys, planes.values)]
            keys = (key_codes[block, :, part, :, row, :] ^ 0x80).view(np.int8)
            values = value_codes[block, :, part, :, row // 4, :, row % 4].view(np.int8)
            keys, values = (
                codes.reshape(count, heads, -1) * scale[..., None]
                for codes, scale in zip((keys, values), scales, strict=True)
            )
        return keys.reshape(count, heads, -1), values.reshape(count, heads, -1)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] f32, rounded as the forward rounds them."""
        planes = self._layers[layer]
        block, part, row = self._split(slots)
        count, heads = len(block), planes.keys.shape[1]
        if self.form == PAIRS:
            all_keys, all_values = _pairs(planes)
            all_keys[block, :, part, :, row, :] = _round(keys).reshape(count, heads, -1, 2)
            columns = _round(values).reshape(count, heads, -1, LANES)
            all_values[block, :, part, :, row // 2, :, row % 2] = columns
            return
        coded_keys, coded_values = _codes(planes)
        (key_codes, key_scales), (value_codes, value_scales) = _quantize(keys), _quantize(values)
        coded_keys[block, :, part, :, row, :] = (key_codes ^ 0x80).reshape(count, heads, -1, 4)
        coded_columns = value_codes.reshape(count, heads, -1, LANES)
        coded_values[block, :, part, :, row // 4, :, row % 4] = coded_columns
        _scales(planes.keys)[block, :, part, row] = key_scales
        _scales(planes.values)[block, :, part, row] = value_scales

    def _split(
        self, slots: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        chosen = np.asarray(list(slots), np.int64)
        inside = chosen % self.block_size
        return chosen // self.block_size, inside // LANES, inside % LANES


def _plane(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Zeros without huge pages: a block that is written must not make its neighbours resident."""
    count = int(np.prod(shape))
    return map_pages(count, huge=False)[:count].reshape(shape)


def _pairs(planes: LayerPlanes) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Views of keys [N, H, S, D / 2, 16, 2] and values [N, H, S, D / 16, 8, 16, 2], bf16 as u2."""
    runs, size = planes.keys.shape[:3], planes.head_dim
    return (
        planes.keys.view(np.uint16).reshape(*runs, size // 2, LANES, 2),
        planes.values.view(np.uint16).reshape(*runs, size // LANES, LANES // 2, LANES, 2),
    )


def _codes(planes: LayerPlanes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Views of keys [N, H, S, D / 4, 16, 4] (code + 128) and values [N, H, S, D / 16, 4, 16, 4], u1."""
    runs, size = planes.keys.shape[:3], planes.head_dim
    keys, values = (plane[..., : LANES * size] for plane in (planes.keys, planes.values))
    return (
        _split_last(keys, (*runs, size // 4, LANES, 4)),
        _split_last(values, (*runs, size // LANES, LANES // 4, LANES, 4)),
    )


def _split_last(plane: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a view: the bytes of a run are contiguous, the runs are not."""
    inner = shape[3:]
    strides = [int(np.prod(inner[index + 1 :])) for index in range(len(inner))]
    return np.lib.stride_tricks.as_strided(plane, shape, (*plane.strides[:3], *strides))


def _scales(plane: NDArray[np.uint8]) -> NDArray[np.float32]:
    """View the scales of a plane of codes, f32 [N, H, S, 16]."""
    return plane[..., -4 * LANES :].view(np.float32)


def _widen(rows: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (rows.astype(np.uint32) << 16).view(np.float32)


def _round(rows: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round f32 to bf16, to even; NaN stays NaN."""
    plain = np.ascontiguousarray(rows, np.float32)
    bits = plain.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(plain), 0x7FC0, rounded).astype(np.uint16)


def _quantize(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return codes as u1 and scales [n, H]: what `row_scale` and `write_codes` of the kernels do."""
    largest = np.maximum(np.abs(rows).max(axis=-1), np.float32(1e-30))  # keeps a NaN
    exact = (largest / np.float32(127.0)).astype(np.float32)
    bits = (exact.view(np.uint32) + np.uint32(127)) & np.uint32(0xFFFFFF80)
    scales = np.where(np.isnan(exact), exact, bits.view(np.float32))
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(rows * (np.float32(1.0) / scales)[..., None]), -127, 127)
        return np.nan_to_num(codes).astype(np.int8).view(np.uint8), scales
