"""The plan of a step, and the arrays that say it to a runner.

Block tables live in one array with a row per slot, to which only new blocks are added, so a step of
decodes costs a few gathers however long its contexts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling_rows import SampleRows, SlotSampling
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
    is_flying: bool = False
    """Whether the step was launched and its sequences count its tokens as in flight."""

    def take_off(self) -> None:
        """Tell every sequence that its tokens are in flight, and in which row it draws."""
        self.is_flying = True
        row = 0
        for entry in self.entries:
            row += entry.num_score_rows
            entry.sequence.take_off(entry.num_tokens, row if entry.drawing else -1)
            row += len(entry.drawing)

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step can be planned before this one's tokens are known.

        Penalties count them, scores say how far a prompt has come, and forks are placed behind them.
        """
        return not any(
            entry.num_score_rows
            or len(entry.drawing) > 1
            or entry.sequence.sampling.history is not None
            for entry in self.entries
        )

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
        """Return the arrays of a plan. Tokens that a step in flight draws are named by their row there."""
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
        token_ids, token_sources = _tokens(entries)
        row_tokens, rows, sample_starts = _sample_rows(entries)
        return ForwardBatch(
            token_ids=token_ids,
            token_sources=token_sources,
            positions=np.repeat(positions, counts) + token_offsets,
            query_starts=starts,
            slots=slots,
            kv_lens=kv_lens,
            block_tables=tables,
            sample_rows=np.array(row_tokens, np.int32),
            sample_starts=np.array(sample_starts, np.int32),
            draft_token_ids=np.full(len(rows), -1, np.int32),
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
        width = max([len(sequence.block_ids) for sequence in sequences])
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


def _tokens(entries: list[PlannedSequence]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return token ids and token sources [T]; a token that is not known yet has the id 0."""
    token_ids: list[int] = []
    unknown: list[tuple[int, int]] = []
    for entry in entries:
        sequence = entry.sequence
        if sequence.flying_row >= 0:
            unknown.append((len(token_ids), sequence.flying_row))
            token_ids.append(0)
        elif entry.num_tokens == 1:
            token_ids.append(sequence.token_ids[sequence.next_position])
        else:
            first = sequence.next_position
            token_ids += sequence.token_ids[first : first + entry.num_tokens]
    sources = np.full(len(token_ids), -1, np.int32)
    if unknown:
        places, rows = zip(*unknown, strict=True)
        sources[list(places)] = rows
    return np.array(token_ids, np.int32), sources


def _sample_rows(entries: list[PlannedSequence]) -> tuple[list[int], SampleRows, list[int]]:
    """Return the token that each sample row belongs to [R], the rows, and sample starts [S + 1]."""
    row_tokens: list[int] = []
    rows = SampleRows()
    sample_starts = [0]
    start = 0
    for entry in entries:
        if entry.num_score_rows:
            _add_score_rows(entry, start, row_tokens, rows)
        start += entry.num_tokens
        sequence = entry.sequence
        for choice in entry.drawing:
            row_tokens.append(start - 1)
            num_tokens = sequence.num_expected_tokens
            num_output = num_tokens - len(sequence.request.prompt_token_ids)
            rows.add_draw(sequence.slot, num_tokens, choice.seed, choice.sampling, num_output)
        sample_starts.append(len(row_tokens))
    return row_tokens, rows, sample_starts


def _add_score_rows(
    entry: PlannedSequence, start: int, row_tokens: list[int], rows: SampleRows
) -> None:
    """Add a row per prompt token scored: the row of the token before it predicts it."""
    sequence = entry.sequence
    num_scored = sequence.family.num_scored
    num_logprobs = sequence.request.sampling.prompt_logprobs
    assert num_logprobs is not None, "only a request that asked for it scores its prompt"
    for position in range(num_scored, num_scored + entry.num_score_rows):
        row_tokens.append(start + position - 1 - sequence.next_position)
        rows.add_score(sequence.slot, position, sequence.token_ids[position], num_logprobs)
