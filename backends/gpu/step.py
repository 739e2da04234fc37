"""A batch on the device: what every layer asks of it, uploaded once per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.gpu.kernels import MAX_QUERY_ROWS, DeviceWork
from headrace.backends.gpu.work_list import WorkList, plan_attention
from headrace.types import ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS_PER_MULTIPROCESSOR = 3


@dataclass(frozen=True, slots=True)
class LongSequence:
    """A sequence whose queries torch attends to."""

    first: int
    last: int
    """Its tokens are first .. last - 1 of the step."""
    slots: torch.Tensor  # [kv_len] i8: where its rows are
    block_table: torch.Tensor  # [1, blocks] i4: the same by block


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One KV group's part of a step."""

    slots: torch.Tensor  # [T] i8; -1: the token is filling
    work: DeviceWork | None
    """None where no sequence is short."""
    long: tuple[LongSequence, ...]


@dataclass(frozen=True, slots=True)
class GpuStep:
    """What plan_step returns."""

    token_ids: torch.Tensor  # [T] i4
    positions: torch.Tensor  # [T] i4
    sample_rows: torch.Tensor  # [R] i4
    groups: tuple[GroupStep, ...]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What planning must know of a KV group."""

    num_kv_heads: int
    head_dim: int
    group: int
    """Query heads per KV head."""
    window: int | None
    tile_tokens: int


def blocks_wanted(shape: GroupShape, num_multiprocessors: int) -> int:
    """Return how many pieces keep every multiprocessor busy: each is a block per KV head."""
    return max(1, -(-BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors // shape.num_kv_heads))


def is_short(shape: GroupShape, num_queries: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Say which sequences [S] our kernel attends to: those with few query rows per KV head, but some."""
    few = (num_queries == 1) | (num_queries * shape.group <= MAX_QUERY_ROWS)
    return np.asarray(few & (num_queries > 0))


def plan_group(
    batch: ForwardBatch, index: int, shape: GroupShape, num_multiprocessors: int, max_tokens: int
) -> WorkList:
    """Plan group `index` of the batch for work lists with room for `max_tokens` tokens."""
    return plan_attention(
        batch.query_starts,
        batch.kv_lens[index],
        is_short(shape, np.diff(batch.query_starts)),
        window=shape.window,
        tile_tokens=shape.tile_tokens,
        blocks_wanted=blocks_wanted(shape, num_multiprocessors),
        max_tokens=max_tokens,
    )


def upload_step(
    batch: ForwardBatch,
    shapes: tuple[GroupShape, ...],
    block_size: int,
    drawn: torch.Tensor,
    num_multiprocessors: int,
) -> GpuStep:
    """Upload a batch of any shape. `drawn` [R of the step before] i4 is on the device."""
    device = drawn.device
    groups = []
    for index, shape in enumerate(shapes):
        planned = plan_group(batch, index, shape, num_multiprocessors, max(1, len(batch.token_ids)))
        work = None
        if planned.counts[0]:
            work = device_work(planned, batch.block_tables[index], shape, device)
        slots = up(batch.slots[index], np.int64, device)
        groups.append(GroupStep(slots, work, _long(batch, index, shape, block_size, device)))
    return GpuStep(
        token_ids=token_ids_of(batch, drawn),
        positions=up(batch.positions, np.int32, device),
        sample_rows=up(batch.sample_rows, np.int32, device),
        groups=tuple(groups),
    )


def token_ids_of(batch: ForwardBatch, drawn: torch.Tensor) -> torch.Tensor:
    """Return the step's tokens, those that the step before drew filled in on the device."""
    token_ids = up(batch.token_ids, np.int32, drawn.device)
    if not (batch.token_sources >= 0).any():
        return token_ids
    sources = up(batch.token_sources, np.int64, drawn.device)
    return torch.where(sources >= 0, drawn[sources.clamp(min=0)], token_ids)


def device_work(
    planned: WorkList, block_table: NDArray[np.int32], shape: GroupShape, device: torch.device
) -> DeviceWork:
    """Upload a work list and make room for its partial results."""
    rows = len(planned.pieces) * shape.num_kv_heads * shape.group * planned.tile_tokens
    return DeviceWork(
        pieces=up(planned.pieces, np.int32, device),
        merges=up(planned.merges, np.int32, device),
        counts=up(planned.counts, np.int32, device),
        block_table=up(block_table, np.int32, device),
        partial_rows=torch.empty(rows, shape.head_dim, device=device),
        partial_sums=torch.empty(rows, 2, device=device),
        tile_tokens=planned.tile_tokens,
    )


def up(array: NDArray[Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to the device."""
    return torch.tensor(np.ascontiguousarray(array, dtype), device=device)


def _long(
    batch: ForwardBatch, index: int, shape: GroupShape, block_size: int, device: torch.device
) -> tuple[LongSequence, ...]:
    counts = np.diff(batch.query_starts)
    found = []
    for sequence in np.flatnonzero(~is_short(shape, counts) & (counts > 0)):
        rows = np.arange(int(batch.kv_lens[index, sequence]))
        blocks = batch.block_tables[index, sequence, rows // block_size].astype(np.int64)
        slots = up(blocks * block_size + rows % block_size, np.int64, device)
        first = int(batch.query_starts[sequence])
        last = first + int(counts[sequence])
        table = batch.block_tables[index, sequence, : -(-len(rows) // block_size)]
        found.append(LongSequence(first, last, slots, up(table[None], np.int32, device)))
    return tuple(found)
