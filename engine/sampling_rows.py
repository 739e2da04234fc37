"""What a step's sample rows ask of the sampler, gathered from what each slot was set up with.

Plain parameters live in one array per parameter, indexed by slot, so that a step costs a gather and
not a loop; only rows with penalties or biases add their own ragged lists.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.types import SamplingBatch, SamplingParams

Ids = NDArray[np.int32]
Values = NDArray[np.float32]

_NO_IDS: Ids = np.empty(0, np.int32)
_NO_VALUES: Values = np.empty(0, np.float32)


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
class SampleRow:
    """A row of logits and what to do with it: draw for a choice, or score a prompt token."""

    slot: int
    position: int
    seed: int = 0
    num_output_tokens: int = 0
    sampling: SequenceSampling | None = None
    """Set where the row has penalties or biases."""
    score_token_id: int = -1
    num_logprobs: int = -1
    """For a scoring row; a drawing row's is its slot's."""


class SlotSampling:
    """The sampling parameters of every slot, and the SamplingBatch of a step."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._repetition = np.ones(num_slots, np.float32)
        self._num_logprobs = np.full(num_slots, -1, np.int32)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._temperature[slot] = params.temperature
        self._top_k[slot] = max(0, params.top_k)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def gather(self, rows: Rows[SampleRow]) -> SamplingBatch:
        slots = np.array([row.slot for row in rows], np.intp)
        scores = np.array([row.score_token_id for row in rows], np.int32)
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        top_p, min_p = self._top_p[slots], self._min_p[slots]
        presence, frequency = self._presence[slots], self._frequency[slots]
        repetition, num_logprobs = self._repetition[slots], self._num_logprobs[slots]
        scoring = np.flatnonzero(scores >= 0)
        if len(scoring):
            for neutral in (temperature, top_k, min_p, presence, frequency):
                neutral[scoring] = 0
            top_p[scoring] = repetition[scoring] = 1
            num_logprobs[scoring] = [row.num_logprobs for row in rows if row.score_token_id >= 0]
        history_starts, history_ids, history_counts = _histories(rows)
        bias_starts, bias_ids, bias_values = _biases(rows)
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            seeds=np.array([row.seed for row in rows], np.uint64),
            positions=np.array([row.position for row in rows], np.int64),
            num_logprobs=num_logprobs,
            score_token_ids=scores,
            history_starts=history_starts,
            history_ids=history_ids,
            history_counts=history_counts,
            bias_starts=bias_starts,
            bias_ids=bias_ids,
            bias_values=bias_values,
        )


def _histories(rows: Rows[SampleRow]) -> tuple[Ids, Ids, Ids]:
    starts = np.zeros(len(rows) + 1, np.int32)
    ids, counts = [_NO_IDS], [_NO_IDS]
    for index, row in enumerate(rows):
        if row.sampling is not None and row.sampling.history is not None:
            row_ids, row_counts = row.sampling.history.arrays()
            ids.append(row_ids)
            counts.append(row_counts)
            starts[index + 1] = len(row_ids)
    return np.cumsum(starts, dtype=np.int32), np.concatenate(ids), np.concatenate(counts)


def _biases(rows: Rows[SampleRow]) -> tuple[Ids, Ids, Values]:
    starts = np.zeros(len(rows) + 1, np.int32)
    ids, values = [_NO_IDS], [_NO_VALUES]
    for index, row in enumerate(rows):
        if row.sampling is not None:
            row_ids, row_values = row.sampling.bias(row.num_output_tokens)
            ids.append(row_ids)
            values.append(row_values)
            starts[index + 1] = len(row_ids)
    return np.cumsum(starts, dtype=np.int32), np.concatenate(ids), np.concatenate(values)
