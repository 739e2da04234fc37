"""A batch as the kernels take it: tensors whose addresses they get, and what every layer asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.types import ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CpuStep:
    """What plan_step returns."""

    token_ids: torch.Tensor  # [T] i4
    positions: torch.Tensor  # [T] i4
    query_starts: torch.Tensor  # [S + 1] i4
    sample_rows: torch.Tensor  # [R] i4
    slots: tuple[torch.Tensor, ...]  # per group [T] i8
    kv_lens: tuple[torch.Tensor, ...]  # per group [S] i4
    block_tables: tuple[torch.Tensor, ...]  # per group [S, B] i4
    num_sequences: int
    table_width: int
    num_scores: int
    """Sum over sequences of queries x rows: how much attention there is."""


def plan(batch: ForwardBatch, drawn: NDArray[np.int32]) -> CpuStep:
    """`drawn` are the tokens that the step before gave, for `token_sources`."""
    token_ids = batch.token_ids
    sources = batch.token_sources
    if (sources >= 0).any():
        token_ids = np.where(sources >= 0, drawn[np.maximum(sources, 0)], token_ids)
    queries = np.diff(batch.query_starts).astype(np.int64)
    lens = batch.kv_lens.astype(np.int64)
    return CpuStep(
        token_ids=_tensor(token_ids, np.int32),
        positions=_tensor(batch.positions, np.int32),
        query_starts=_tensor(batch.query_starts, np.int32),
        sample_rows=_tensor(batch.sample_rows, np.int32),
        slots=tuple(_tensor(row, np.int64) for row in batch.slots),
        kv_lens=tuple(_tensor(row, np.int32) for row in batch.kv_lens),
        block_tables=tuple(_tensor(table, np.int32) for table in batch.block_tables),
        num_sequences=len(queries),
        table_width=batch.block_tables.shape[2],
        num_scores=int((queries * lens).sum(axis=-1).max(initial=0)),
    )


def _tensor(array: NDArray[Any], dtype: type[np.generic]) -> torch.Tensor:
    """The array as a tensor; copied where it cannot be taken as it is."""
    plain = np.ascontiguousarray(array, dtype)
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())
