"""What a step's sample rows ask of the sampler, gathered from what each slot was set up with.

Plain parameters live in one array per parameter, indexed by slot, so that a step costs a gather and
not a loop; only rows with penalties or biases add their own ragged lists.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.types import SamplingBatch, SamplingParams

Ids = NDArray[np.int32]
Values = NDArray[np.float32]

_NO_IDS: Ids = np.empty(0, np.int32)
_NO_VALUES: Values = np.empty(0, np.float32)
_NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""SlotSampling's floats for a row that nothing is drawn from."""


class TokenHistory:
    """The distinct tokens of a prompt and its output, with how often each is in the output."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_token_ids: Rows[int]) -> None:
        self._ids: Ids = np.unique(np.asarray(prompt_token_ids, np.int32))
        self._counts: Ids = np.zeros(len(self._ids), np.int32)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    def add(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = len(self._places)
            self._places[token_id] = place
            if place >= len(self._ids):
                room = max(64, place)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
            self._ids[place] = token_id
        self._counts[place] += 1

    def arrays(self) -> tuple[Ids, Ids]:
        size = len(self._places)
        return self._ids[:size], self._counts[:size]


class SequenceSampling:
    """One choice's penalties and biases; parameters that need neither stay in the slot arrays."""

    __slots__ = ("_bias", "_bias_before_min", "_min_tokens", "_params", "history", "is_plain")

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Rows[int], eos_token_ids: Rows[int]
    ) -> None:
        self._params = params
        self._min_tokens = params.min_tokens
        self.history = TokenHistory(prompt_token_ids) if _has_penalties(params) else None
        self._bias = _bias_arrays(params.logit_bias)
        forbidden = set(params.stop_token_ids)
        if not params.ignore_eos:
            forbidden.update(eos_token_ids)
        barred = dict.fromkeys(forbidden, float("-inf")) if params.min_tokens else {}
        self._bias_before_min = _bias_arrays({**params.logit_bias, **barred})
        self.is_plain = self.history is None and not len(self._bias_before_min[0])

    @property
    def params(self) -> SamplingParams:
        return self._params

    def bias(self, num_output_tokens: int) -> tuple[Ids, Values]:
        """Return ids and what to add to their logits; no stop before min_tokens were drawn."""
        return self._bias_before_min if num_output_tokens < self._min_tokens else self._bias

    def token_drawn(self, token_id: int) -> None:
        if self.history is not None:
            self.history.add(token_id)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _bias_arrays(bias: dict[int, float]) -> tuple[Ids, Values]:
    if not bias:
        return _NO_IDS, _NO_VALUES
    return np.fromiter(bias.keys(), np.int32), np.fromiter(bias.values(), np.float32)


@dataclass(slots=True)
class SampleRows:
    """The rows of logits that a step samples, column by column, and what to do with each."""

    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of the token to draw or score."""
    seeds: list[int] = field(default_factory=list)
    special: list[tuple[int, SequenceSampling, int]] = field(default_factory=list)
    """(row, its penalties and biases, output tokens before it), rows without either left out."""
    scores: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, prompt token to score, how many alternatives), for rows that draw nothing."""

    def __len__(self) -> int:
        return len(self.slots)

    def add_draw(
        self, slot: int, position: int, seed: int, sampling: SequenceSampling, num_output: int
    ) -> None:
        """Add a row that draws a token for a choice."""
        if not sampling.is_plain:
            self.special.append((len(self.slots), sampling, num_output))
        self.slots.append(slot)
        self.positions.append(position)
        self.seeds.append(seed)

    def add_score(self, slot: int, position: int, token_id: int, num_logprobs: int) -> None:
        """Add a row that scores a prompt token."""
        self.scores.append((len(self.slots), token_id, num_logprobs))
        self.slots.append(slot)
        self.positions.append(position)
        self.seeds.append(0)


class SlotSampling:
    """The sampling parameters of every slot, and the SamplingBatch of a step."""

    def __init__(self, num_slots: int) -> None:
        self._floats = np.zeros((6, num_slots), np.float32)
        """temperature, top_p, min_p, presence, frequency and repetition penalty."""
        self._integers = np.zeros((2, num_slots), np.int32)
        """top_k, num_logprobs."""

    def set(self, slot: int, params: SamplingParams) -> None:
        self._floats[:, slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        self._integers[:, slot] = (max(0, params.top_k), num_logprobs)

    def gather(self, rows: SampleRows) -> SamplingBatch:
        slots = np.array(rows.slots, np.intp)
        floats = self._floats.take(slots, axis=1)
        integers = self._integers.take(slots, axis=1)
        scores = np.full(len(slots), -1, np.int32)
        for row, token_id, num_logprobs in rows.scores:
            scores[row] = token_id
            floats[:, row] = _NEUTRAL
            integers[:, row] = (0, num_logprobs)
        history_starts, history_ids, history_counts = _histories(rows)
        bias_starts, bias_ids, bias_values = _biases(rows)
        return SamplingBatch(
            temperature=floats[0],
            top_k=integers[0],
            top_p=floats[1],
            min_p=floats[2],
            presence_penalty=floats[3],
            frequency_penalty=floats[4],
            repetition_penalty=floats[5],
            seeds=np.array(rows.seeds, np.uint64),
            positions=np.array(rows.positions, np.int64),
            num_logprobs=integers[1],
            score_token_ids=scores,
            history_starts=history_starts,
            history_ids=history_ids,
            history_counts=history_counts,
            bias_starts=bias_starts,
            bias_ids=bias_ids,
            bias_values=bias_values,
        )


def _histories(rows: SampleRows) -> tuple[Ids, Ids, Ids]:
    starts = np.zeros(len(rows) + 1, np.int32)
    if not rows.special:
        return starts, _NO_IDS, _NO_IDS
    ids, counts = [_NO_IDS], [_NO_IDS]
    for row, sampling, _num_output in rows.special:
        if sampling.history is not None:
            row_ids, row_counts = sampling.history.arrays()
            ids.append(row_ids)
            counts.append(row_counts)
            starts[row + 1] = len(row_ids)
    return np.cumsum(starts, dtype=np.int32), np.concatenate(ids), np.concatenate(counts)


def _biases(rows: SampleRows) -> tuple[Ids, Ids, Values]:
    starts = np.zeros(len(rows) + 1, np.int32)
    if not rows.special:
        return starts, _NO_IDS, _NO_VALUES
    ids, values = [_NO_IDS], [_NO_VALUES]
    for row, sampling, num_output in rows.special:
        row_ids, row_values = sampling.bias(num_output)
        ids.append(row_ids)
        values.append(row_values)
        starts[row + 1] = len(row_ids)
    return np.cumsum(starts, dtype=np.int32), np.concatenate(ids), np.concatenate(values)
