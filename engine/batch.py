"""The plan of a step, and the arrays that say it to a runner.

Block tables live in one array with a row per slot, to which only new blocks are added, so a step of
decodes costs a few gathers however long its contexts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling_rows import SampleRow, SlotSampling
from headrace.engine.sequence import Sequence
from headrace.types import ForwardBatch


@dataclass(slots=True)
class PlannedSequence:
    """How many of its pending tokens a sequence computes this step, and which rows it samples."""

    sequence: Sequence
    num_tokens: int
    num_score_rows: int = 0
    """Prompt tokens scored this step, the next unscored ones in order."""
    drawing: list[Sequence] = field(default_factory=list)
    """Choices that draw a token from the last row: itself, or all of its family at the prompt's end."""


@dataclass(slots=True)
class BatchPlan:
    """What to run this step, decodes first."""

    entries: list[PlannedSequence] = field(default_factory=list)
    num_decodes: int = 0

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out again, because it was preempted; no effect where it is not planned."""
        for index, entry in enumerate(self.entries):
            if entry.sequence is sequence:
                del self.entries[index]
                self.num_decodes -= index < self.num_decodes
                return

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries[self.num_decodes :])


class BatchBuilder:
    """Turns plans into ForwardBatches. One per engine: it mirrors the slots' block tables."""

    def __init__(
        self, *, num_slots: int, num_groups: int, block_size: int, max_model_len: int
    ) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self._sampling = SlotSampling(num_slots)
        self._occupants: list[Sequence | None] = [None] * num_slots

    def build(self, plan: BatchPlan) -> ForwardBatch:
        entries = plan.entries
        sequences = [entry.sequence for entry in entries]
        for sequence in sequences:
            self._sync_slot(sequence)
        counts = np.array([entry.num_tokens for entry in entries], np.int32)
        starts = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        token_offsets = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
        positions = np.array([sequence.next_position for sequence in sequences], np.int32)
        slots, kv_lens, tables = self._group_arrays(sequences, counts, token_offsets)
        row_tokens, rows, sample_starts = self._sample_rows(entries, starts.tolist())
        num_rows = len(rows)
        return ForwardBatch(
            token_ids=np.array(_token_ids(entries), np.int32),
            token_sources=np.full(len(token_offsets), -1, np.int32),
            positions=np.repeat(positions, counts) + token_offsets,
            query_starts=starts,
            slots=slots,
            kv_lens=kv_lens,
            block_tables=tables,
            sample_rows=np.array(row_tokens, np.int32),
            sample_starts=np.array(sample_starts, np.int32),
            draft_token_ids=np.full(num_rows, -1, np.int32),
            sampling=self._sampling.gather(rows),
        )

    def _sync_slot(self, sequence: Sequence) -> None:
        if self._occupants[sequence.slot] is not sequence:
            self._occupants[sequence.slot] = sequence
            self._sampling.set(sequence.slot, sequence.request.sampling)
        known, held = sequence.num_table_blocks, len(sequence.block_ids)
        if known != held:
            self._tables[sequence.slot, known:held] = sequence.block_ids[known:]
            sequence.num_table_blocks = held

    def _group_arrays(
        self,
        sequences: list[Sequence],
        counts: NDArray[np.int32],
        token_offsets: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Return slots [G, T], kv_lens [G, S] and block tables [G, S, B]."""
        size = self._block_size
        width = max(len(sequence.block_ids) for sequence in sequences)
        places = np.array([sequence.slot for sequence in sequences], np.intp)
        tables = np.empty((self._num_groups, len(sequences), width), np.int32)
        kv_lens = np.empty((self._num_groups, len(sequences)), np.int32)
        slots = np.empty((self._num_groups, len(token_offsets)), np.int64)
        token_places = np.repeat(places, counts)
        for group in range(self._num_groups):
            rows = np.array([sequence.num_kv_rows(group) for sequence in sequences], np.int32)
            tables[group] = self._tables[places, :width]
            kv_lens[group] = rows + counts
            token_rows = np.repeat(rows, counts) + token_offsets
            blocks = self._tables[token_places, token_rows // size].astype(np.int64)
            slots[group] = blocks * size + token_rows % size
        return slots, kv_lens, tables

    def _sample_rows(
        self, entries: list[PlannedSequence], starts: list[int]
    ) -> tuple[list[int], list[SampleRow], list[int]]:
        row_tokens: list[int] = []
        rows: list[SampleRow] = []
        sample_starts = [0]
        for entry, start in zip(entries, starts, strict=False):
            sequence = entry.sequence
            if entry.num_score_rows:
                _add_score_rows(entry, start, row_tokens, rows)
            for choice in entry.drawing:
                row_tokens.append(start + entry.num_tokens - 1)
                sampling = choice.sampling
                rows.append(
                    SampleRow(
                        slot=sequence.slot,
                        position=sequence.num_tokens,
                        seed=choice.seed,
                        num_output_tokens=sequence.num_output_tokens,
                        sampling=None if sampling.is_plain else sampling,
                    )
                )
            sample_starts.append(len(rows))
        return row_tokens, rows, sample_starts


def _token_ids(entries: list[PlannedSequence]) -> list[int]:
    token_ids: list[int] = []
    for entry in entries:
        sequence = entry.sequence
        first = sequence.num_computed_tokens
        token_ids += sequence.token_ids[first : first + entry.num_tokens]
    return token_ids


def _add_score_rows(
    entry: PlannedSequence, start: int, row_tokens: list[int], rows: list[SampleRow]
) -> None:
    """Add a row per prompt token scored: the row of the token before it predicts it."""
    sequence = entry.sequence
    num_scored = sequence.family.num_scored
    num_logprobs = sequence.request.sampling.prompt_logprobs
    assert num_logprobs is not None, "only a request that asked for it scores its prompt"
    for position in range(num_scored, num_scored + entry.num_score_rows):
        row_tokens.append(start + position - 1 - sequence.num_computed_tokens)
        rows.append(
            SampleRow(
                slot=sequence.slot,
                position=position,
                score_token_id=sequence.token_ids[position],
                num_logprobs=num_logprobs,
            )
        )
