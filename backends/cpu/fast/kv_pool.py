"""The KV pool of the fast path, in the order that kernels_attend reads, resident only where written.

A group's memory is [spans, layers, num_kv_heads, blocks of a span, block_size / 16, 2, ...]: behind the keys of
16 rows of one head lie their values, then those of the next block. Spans are a few megabytes of blocks, all
their layers together, so that the pool is made of huge pages (with small ones reading from memory takes half as
long again) and yet grows with the blocks that are written: by a span, not by a huge page for every layer.
`write_rows` and `read_rows` translate to rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headrace.backends.cpu.fast.arena import address, make_resident, map_pages
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_attend_codes import SCALE_SHARE
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS, block_bytes
from headrace.backends.cpu.fast.kernels_hadamard import hadamard_rows, hadamard_run
from headrace.backends.cpu.fast.layout import LAYER_FIELDS
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)
FORMS: Mapping[str, int] = {"bfloat16": PAIRS, "int8": CODES}
"""`kv_dtype` to how rows are kept."""


SPAN_BYTES = 8 << 20
"""Of all layers of a group: what becomes resident with the first row written in a span, at most."""
MAX_SPAN_BLOCKS = 64
AHEAD_BYTES = 1 << 30
"""What is made resident of a pool beyond the highest blocks written, while there is nothing else to do, once
half of it is used up: more often it would only stand in the way of who comes next."""
PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """One layer's view of its group, u1 [spans, H, blocks of a span, S, 2, block_bytes]: keys, then values."""

    runs: NDArray[np.uint8]
    head_dim: int


def bytes_per_block(groups: Sequence[KVGroupSpec], block_size: int, form: int) -> int:
    """Return what a block of the engine's takes in all groups and layers, keys and values."""
    runs = block_size // LANES
    return sum(
        2 * len(g.layers) * g.num_kv_heads * runs * block_bytes(g.head_dim, form) for g in groups
    )


def _span_shift(group_bytes: int, num_blocks: int) -> int:
    """Return log2 of the blocks in a span, of a group with `group_bytes` per block."""
    most = min(MAX_SPAN_BLOCKS, max(1, SPAN_BYTES // group_bytes), max(1, num_blocks))
    return most.bit_length() - 1


class FastKVPool:
    """All layers of one model."""

    def __init__(
        self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, form: int
    ) -> None:
        self.block_size = block_size
        self.form = form
        self._most_used = 0
        self._preparing = threading.Lock()
        self._is_filling = True
        """Whether what `prepare` shall have ahead is being made up."""
        self._resident: list[int] = []
        """Per group, how many of its bytes `prepare` has made resident."""
        self._groups: list[NDArray[np.uint8]] = []
        self._layers: dict[int, LayerRuns] = {}
        for group in groups:
            if not group.layers:
                continue
            shift = _span_shift(bytes_per_block([group], block_size, form), num_blocks)
            inner = (1 << shift, block_size // LANES, 2, block_bytes(group.head_dim, form))
            spans = -(-num_blocks >> shift)
            shape = (spans, len(group.layers), group.num_kv_heads, *inner)
            count = math.prod(shape)
            memory = map_pages(count)[:count].reshape(shape)
            self._groups.append(memory)
            self._resident.append(0)
            for index, layer in enumerate(group.layers):
                self._layers[layer] = LayerRuns(memory[:, index], group.head_dim)

    def addresses(self) -> NDArray[np.int64]:
        """Return [layers, LAYER_FIELDS] (see layout)."""
        table = np.zeros((max(self._layers, default=-1) + 1, LAYER_FIELDS), np.int64)
        for number, layer in self._layers.items():
            shift = layer.runs.shape[2].bit_length() - 1
            table[number] = address(layer.runs), layer.runs.strides[0], shift
        return table

    def note_use(self, block: int) -> int:
        """Note that a step writes a block: `prepare` stays ahead of the highest.

        Return how many bytes up to there are not resident yet, as far as is known here.
        """
        self._most_used = max(self._most_used, block)
        return sum(self._missing(number, 0) for number in range(len(self._groups)))

    def forget_use(self) -> None:
        """Forget what was noted: it was a trial."""
        self._most_used = 0

    def prepare(self, *, ahead: bool = True) -> bool:
        """Make a piece of memory resident that steps will write next; False: nothing is left to do.

        `ahead`: beyond the highest block too. Two threads may call it at once: each has a piece of its own.

        The first write to a page has the system find and clear one, and under a hypervisor the host as
        well: 2.5 ms a megabyte on a virtual machine, which was a tenth of a prompt's time.
        """
        if ahead and not self._is_filling:
            numbers = range(len(self._groups))
            if not any(self._missing(number, self._ahead_bytes(number) // 2) for number in numbers):
                return False
            self._is_filling = True
        for number, memory in enumerate(self._groups):
            with self._preparing:
                if not self._missing(number, self._ahead_bytes(number) if ahead else 0):
                    continue
                done = self._resident[number]
                piece = memory.reshape(-1)[done : done + PIECE_BYTES]
                self._resident[number] += piece.nbytes
            if not make_resident(piece):
                self._resident[number] = memory.nbytes
            return True
        if ahead:
            self._is_filling = False
        return False

    def _ahead_bytes(self, number: int) -> int:
        """A group's share of AHEAD_BYTES."""
        whole = sum(memory.nbytes for memory in self._groups)
        return AHEAD_BYTES * self._groups[number].nbytes // whole

    def _missing(self, number: int, ahead_bytes: int) -> int:
        """How many bytes of a group are not resident, up to so many behind its highest block."""
        memory = self._groups[number]
        used = (self._most_used // memory.shape[3] + 1) * memory[0].nbytes
        return max(0, int(min(memory.nbytes, used + ahead_bytes)) - self._resident[number])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) byte for byte."""
        for memory in self._groups:
            size = memory.shape[3]
            for source, target in pairs:
                copied = memory[source // size, :, :, source % size]
                memory[target // size, :, :, target % size] = copied

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values [n, num_kv_heads, head_dim] f32."""
        chosen = self._layers[layer]
        (span, block, part), row = self._split(layer, slots)
        count, heads = len(block), chosen.runs.shape[1]
        if self.form == PAIRS:
            all_keys, all_values = _pairs(chosen)
            keys = _widen(all_keys[span, :, block, part, :, row, :])  # [n, H, D / 2, 2]
            values = _widen(all_values[span, :, block, part, :, row // 2, :, row % 2])
        else:
            key_codes, value_codes = _codes(chosen)
            scales = [scale[span, :, block, part, row] for scale in _scales(chosen)]
            keys = (key_codes[span, :, block, part, :, row, :] ^ 0x80).view(np.int8)
            values = value_codes[span, :, block, part, :, row // 4, :, row % 4].view(np.int8)
            keys, values = (
                codes.reshape(count, heads, -1) * scale[..., None]
                for codes, scale in zip((keys, values), scales, strict=True)
            )
            keys = (hadamard_rows(keys) / hadamard_run(chosen.head_dim)).astype(np.float32)
        return keys.reshape(count, heads, -1), values.reshape(count, heads, -1)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] f32, rounded as the forward rounds them."""
        chosen = self._layers[layer]
        (span, block, part), row = self._split(layer, slots)
        count, heads = len(block), chosen.runs.shape[1]
        if self.form == PAIRS:
            all_keys, all_values = _pairs(chosen)
            all_keys[span, :, block, part, :, row, :] = _round(keys).reshape(count, heads, -1, 2)
            columns = _round(values).reshape(count, heads, -1, LANES)
            all_values[span, :, block, part, :, row // 2, :, row % 2] = columns
            return
        coded_keys, coded_values = _codes(chosen)
        mixed = hadamard_rows(keys).astype(np.float32)
        (key_codes, key_scales), (value_codes, value_scales) = _quantize(mixed), _quantize(values)
        quads = (key_codes ^ 0x80).reshape(count, heads, -1, 4)
        coded_keys[span, :, block, part, :, row, :] = quads
        coded_columns = value_codes.reshape(count, heads, -1, LANES)
        coded_values[span, :, block, part, :, row // 4, :, row % 4] = coded_columns
        for all_scales, scales in zip(_scales(chosen), (key_scales, value_scales), strict=True):
            all_scales[span, :, block, part, row] = scales

    def _split(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
        """Return each slot's span, block in it and 16 rows in that, and its row of those."""
        chosen = np.asarray(list(slots), np.int64)
        blocks, inside = chosen // self.block_size, chosen % self.block_size
        size = self._layers[layer].runs.shape[2]
        return (blocks // size, blocks % size, inside // LANES), inside % LANES


def _pairs(layer: LayerRuns) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Views of keys [P, H, B, S, D / 2, 16, 2] and values [P, H, B, S, D / 16, 8, 16, 2], bf16 as u2."""
    runs, size = layer.runs.view(np.uint16), layer.head_dim
    return (
        _split_last(runs[..., 0, :], (size // 2, LANES, 2)),
        _split_last(runs[..., 1, :], (size // LANES, LANES // 2, LANES, 2)),
    )


def _codes(layer: LayerRuns) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Views of keys [P, H, B, S, D / 4, 16, 4] (code + 128) and values [P, H, B, S, D / 16, 4, 16, 4], u1."""
    runs, size = layer.runs, layer.head_dim
    return (
        _split_last(runs[..., 0, : LANES * size], (size // 4, LANES, 4)),
        _split_last(runs[..., 1, : LANES * size], (size // LANES, LANES // 4, LANES, 4)),
    )


def _scales(layer: LayerRuns) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Views of the scales of keys and of values as codes, f32 [P, H, B, S, 16]."""
    scales = layer.runs[..., -4 * LANES :].view(np.float32)
    return scales[..., 0, :], scales[..., 1, :]


def _split_last(runs: NDArray[Number], inner: tuple[int, ...]) -> NDArray[Number]:
    """Return a view with the last axis as `inner`: the bytes of a run are contiguous, the runs are not."""
    strides = [runs.itemsize * math.prod(inner[index + 1 :]) for index in range(len(inner))]
    shape = (*runs.shape[:-1], *inner)
    return np.lib.stride_tricks.as_strided(runs, shape, (*runs.strides[:-1], *strides))


def _widen(rows: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (rows.astype(np.uint32) << 16).view(np.float32)


def _round(rows: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round f32 to bf16, to even; NaN stays NaN."""
    plain = np.ascontiguousarray(rows, np.float32)
    bits = plain.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(plain), 0x7FC0, rounded).astype(np.uint16)


def _quantize(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return codes as u1 and scales [n, H]: what `write_codes` of the kernels does."""
    largest = np.maximum(np.abs(rows).max(axis=-1), np.float32(1e-30))  # keeps a NaN
    exact = (largest * np.float32(SCALE_SHARE)).astype(np.float32)
    bits = (exact.view(np.uint32) + np.uint32(255)) & np.uint32(0xFFFFFF00)
    scales = np.where(np.isnan(exact), exact, bits.view(np.float32))
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(rows * (np.float32(1.0) / scales)[..., None]), -127, 127)
        return np.nan_to_num(codes).astype(np.int8).view(np.uint8), scales
