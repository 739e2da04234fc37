"""ForwardBatch and SamplingBatch from a few facts: for warm-up, benchmarks and tests of backends.

The engine builds its own batches from its sequences; these stand in where there is no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.types import ForwardBatch, SamplingBatch

OFF: Mapping[str, tuple[type, float]] = {
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "seeds": (np.uint64, 0),
    "positions": (np.int64, 0),
    "num_logprobs": (np.int32, -1),
    "score_token_ids": (np.int32, -1),
}
"""Every column of SamplingBatch with one number per row: its type, and the number that turns it off."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one sequence computes in a step."""

    token_ids: Sequence[int]
    num_computed: int
    """Rows of the sequence that are in the cache already; the tokens take the next positions."""
    block_ids: Sequence[int]
    sample_offsets: Sequence[int] | None = None
    """Which of `token_ids` are sampled behind; None: the last."""

    def offsets(self) -> Sequence[int]:
        return [len(self.token_ids) - 1] if self.sample_offsets is None else self.sample_offsets


def sampling_batch(
    num_rows: int,
    columns: Mapping[str, Sequence[float] | NDArray[np.generic]] | None = None,
    *,
    histories: Sequence[Mapping[int, int]] = (),
    biases: Sequence[Mapping[int, float]] = (),
) -> SamplingBatch:
    """Return a batch with everything off but `columns`, and greedy where no temperature is given.

    `histories` and `biases` have an entry per row, or none at all: token id to its count in the
    output (0: prompt only), and token id to what is added to its logit.
    """
    given = columns or {}
    history_starts, history = _ragged(num_rows, histories)
    bias_starts, bias = _ragged(num_rows, biases)
    arrays: dict[str, Any] = {
        name: np.full(num_rows, off, kind) if name not in given else np.asarray(given[name], kind)
        for name, (kind, off) in OFF.items()
    }
    return SamplingBatch(
        **arrays,
        history_starts=history_starts,
        history_ids=np.array([token for token, _ in history], np.int32),
        history_counts=np.array([count for _, count in history], np.int32),
        bias_starts=bias_starts,
        bias_ids=np.array([token for token, _ in bias], np.int32),
        bias_values=np.array([value for _, value in bias], np.float32),
    )


def forward_batch(
    steps: Sequence[SequenceStep],
    *,
    block_size: int,
    num_groups: int = 1,
    sampling: SamplingBatch | None = None,
    token_sources: Sequence[int] | None = None,
) -> ForwardBatch:
    """Return the batch that computes `steps`; every KV group uses the same block ids."""
    positions = [np.arange(len(s.token_ids)) + s.num_computed for s in steps]
    slots = [_slots(s, p, block_size) for s, p in zip(steps, positions, strict=True)]
    query_starts = np.cumsum([0, *(len(s.token_ids) for s in steps)])
    sample_rows = [
        first + offset
        for first, s in zip(query_starts, steps, strict=False)
        for offset in s.offsets()
    ]
    tables = np.full((len(steps), max((len(s.block_ids) for s in steps), default=0)), -1, np.int32)
    for table, s in zip(tables, steps, strict=True):
        table[: len(s.block_ids)] = s.block_ids
    token_ids = np.array([token for s in steps for token in s.token_ids], np.int32)
    no_sources = np.full(len(token_ids), -1, np.int32)
    kv_lens = np.array([s.num_computed + len(s.token_ids) for s in steps], np.int32)
    return ForwardBatch(
        token_ids=token_ids,
        token_sources=no_sources if token_sources is None else np.array(token_sources, np.int32),
        positions=np.concatenate([*positions, []]).astype(np.int32),
        query_starts=query_starts.astype(np.int32),
        slots=np.tile(np.concatenate([*slots, []]).astype(np.int64), (num_groups, 1)),
        kv_lens=np.tile(kv_lens, (num_groups, 1)),
        block_tables=np.tile(tables, (num_groups, 1, 1)),
        sample_rows=np.array(sample_rows, np.int32),
        sample_starts=np.cumsum([0, *(len(s.offsets()) for s in steps)]).astype(np.int32),
        draft_token_ids=np.full(len(sample_rows), -1, np.int32),
        sampling=sampling_batch(len(sample_rows)) if sampling is None else sampling,
    )


def _slots(step: SequenceStep, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    blocks = np.asarray(step.block_ids, np.int64)[positions // block_size]
    return np.asarray(blocks * block_size + positions % block_size)


def _ragged(
    num_rows: int, tables: Sequence[Mapping[int, float]]
) -> tuple[NDArray[np.int32], list[tuple[int, float]]]:
    """Return starts [num_rows + 1] and the items of all rows, one after the other."""
    tables = tables or [{}] * num_rows
    starts = np.cumsum([0, *(len(table) for table in tables)]).astype(np.int32)
    return starts, [item for table in tables for item in table.items()]
