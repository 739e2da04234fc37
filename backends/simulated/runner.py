"""A Runner without tensors: each step costs what the step-time formula says and draws made-up tokens.

Tokens depend on seed and position only, so a simulated run repeats exactly. On a clock that can be
advanced (headrace.testing.FakeClock) a step takes virtual time; on a real one it sleeps.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.simulated.tokens import MadeUpTokens, mix
from headrace.interfaces import Clock
from headrace.step_time import StepTime
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    RunBatch,
    RunResult,
    SamplingBatch,
    StepResult,
    TokenMasks,
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """What a step costs on the pretended device, and how much memory it has."""

    step_time: StepTime
    weight_bytes: int = 0
    memory_bytes: int = 1 << 40
    runs_ahead: bool = False
    """Whether a step may be launched while the one before runs, as on a GPU."""


class SimulatedRunner:
    """What the engine drives where only time and memory matter.

    Implements headrace.interfaces.RepeatingRunner; on a clock that can be advanced only.
    """

    def __init__(
        self,
        *,
        groups: Sequence[KVGroupSpec],
        vocab_size: int,
        settings: EngineSettings,
        clock: Clock,
        device: SimulatedDevice,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = settings.block_size
        self._groups = tuple(groups)
        self._clock = clock
        self._device = device
        self._kv_dtype_bytes = _DTYPE_BYTES[settings.kv_dtype]
        self._num_blocks = 0
        self._is_closed = False
        self.runs_ahead = device.runs_ahead
        self._advance: Callable[[float], None] | None = getattr(clock, "advance", None)
        self._set: Callable[[float], None] | None = getattr(clock, "set", None)
        self.can_repeat = self._set is not None
        self._busy_until = float("-inf")
        self._tokens = MadeUpTokens(vocab_size)
        self._drawn = np.empty(0, np.int32)  # [R] of the step launched last

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return self._groups

    def memory(self) -> MemoryReport:
        per_row = sum(
            2 * len(group.layers) * group.num_kv_heads * group.head_dim * self._kv_dtype_bytes
            for group in self._groups
        )
        per_block = per_row * self.block_size
        pool = per_block * self._num_blocks
        return MemoryReport(
            weight_bytes=self._device.weight_bytes,
            kv_bytes_per_block=per_block,
            kv_pool_bytes=pool,
            available_bytes=max(0, self._device.memory_bytes - self._device.weight_bytes - pool),
        )

    def allocate(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def warm_up(self, report: Any) -> None:
        report(1.0)

    def execute(self, batch: ForwardBatch) -> SimulatedStep:
        """Launch a step: it begins now, or when the one before is done."""
        assert not self._is_closed, "the runner is closed"
        now = self._clock.now()
        seconds = self._seconds(batch)
        waits = self._busy_until > now
        self._busy_until = (self._busy_until if waits else now) + seconds
        known = self._with_drawn(batch)
        result = _draw(self.contexts(known), known.sampling, self._tokens, self.vocab_size)
        self._drawn = result.token_ids
        return SimulatedStep(self, result, seconds, self._busy_until)

    def repeat(self, batch: RunBatch, max_steps: int, until: float) -> RunResult:
        assert not self._is_closed, "the runner is closed"
        assert self._set is not None, "only virtual time can be run through"
        now = self._clock.now()
        first = self._device.step_time.seconds(
            batch.num_prefill_tokens, batch.num_sequences, batch.num_kv_rows
        )
        if max_steps == 1:
            return self._repeated(batch, [now + float(first)])
        if first > 0 and until < now + max_steps * first:  # no later step is shorter
            max_steps = max(1, min(max_steps, int((until - now) / first) + 2))
        rows = batch.num_kv_rows + batch.num_sequences * np.arange(max_steps, dtype=np.int64)
        ends: NDArray[np.float64] = self._device.step_time.seconds(
            batch.num_prefill_tokens, batch.num_sequences, rows
        )
        ends[0] += now
        np.add.accumulate(ends, out=ends)  # in the order in which single steps add up
        times: list[float] = ends.tolist()
        num_steps = 1 + bisect_left(times, until, 0, max_steps - 1) if now < until else 1
        return self._repeated(batch, times[:num_steps])

    def _repeated(self, batch: RunBatch, times: list[float]) -> RunResult:
        """Let the time pass until the last of these steps is done, and draw their tokens."""
        assert self._set is not None, "only virtual time can be run through"
        self._set(times[-1])
        self._busy_until = times[-1]
        draw, count = self._tokens.in_a_row, len(times)
        rows = zip(batch.seeds, batch.positions, strict=True)
        return RunResult([draw(seed, position, count) for seed, position in rows], times)

    def _with_drawn(self, batch: ForwardBatch) -> ForwardBatch:
        """Put in the tokens that the step before drew where the batch names its rows."""
        places = np.flatnonzero(batch.token_sources >= 0)
        if not len(places):
            return batch
        token_ids = batch.token_ids.copy()
        token_ids[places] = self._drawn[batch.token_sources[places]]
        return replace(batch, token_ids=token_ids)

    def _seconds(self, batch: ForwardBatch) -> float:
        starts = batch.query_starts
        num_sequences, num_tokens = len(starts) - 1, int(starts[-1])
        num_prefill_tokens = 0
        if num_tokens > num_sequences:
            counts = np.diff(starts)
            num_prefill_tokens = int(counts[counts > 1].sum())
        num_kv_rows = int(batch.kv_lens[0].sum())
        seconds = self._device.step_time.seconds(num_prefill_tokens, num_sequences, num_kv_rows)
        return float(seconds)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There is nothing to copy."""

    def read_rows(self, layer: int, slots: Sequence[int]) -> tuple[Any, Any]:
        group = next(group for group in self._groups if layer in group.layers)
        shape = (len(slots), group.num_kv_heads, group.head_dim)
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def write_rows(self, layer: int, slots: Sequence[int], keys: Any, values: Any) -> None:
        """There is nowhere to write."""

    def close(self) -> None:
        self._is_closed = True

    def wait(self, step: SimulatedStep) -> None:
        """Let the time pass until a step is done."""
        now = self._clock.now()
        is_alone = now + step.seconds == step.done_at  # then no rounding of a difference
        seconds = step.seconds if is_alone else step.done_at - now
        if seconds <= 0:
            return
        if self._advance is not None:
            self._advance(seconds)
        else:
            time.sleep(seconds)

    def contexts(self, batch: ForwardBatch) -> NDArray[np.uint64]:
        """Return a number per sample row that the drawn token depends on, seed apart. [R]"""
        return np.asarray(batch.sampling.positions, np.uint64)


class SimulatedStep:
    """A step that is done when its time has passed."""

    def __init__(
        self,
        runner: SimulatedRunner,
        result: StepResult,
        seconds: float,
        done_at: float,
    ) -> None:
        self._runner = runner
        self._result = result
        self._has_sampled = False
        self.seconds = seconds
        self.done_at = done_at

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert not self._has_sampled, "sample is called once"
        self._has_sampled = True

    def result(self) -> StepResult:
        assert self._has_sampled, "result comes after sample"
        self._runner.wait(self)
        return self._result


def _draw(
    contexts: NDArray[np.uint64], sampling: SamplingBatch, tokens: MadeUpTokens, vocab_size: int
) -> StepResult:
    """Return a made-up token per row; what a bias of -inf forbids is not drawn."""
    seeds = np.where(
        sampling.temperature > 0, sampling.seeds, np.uint64(0)
    )  # greedy rows ignore theirs
    drawn = tokens.drawn(contexts, seeds)
    for row in np.flatnonzero(np.diff(sampling.bias_starts)):
        start, end = sampling.bias_starts[row], sampling.bias_starts[row + 1]
        forbidden = sampling.bias_ids[start:end][np.isneginf(sampling.bias_values[start:end])]
        while drawn[row] in forbidden:
            drawn[row] = (drawn[row] + 1) % vocab_size
    scored = sampling.score_token_ids >= 0
    token_ids = np.where(scored, sampling.score_token_ids, drawn).astype(np.int32)
    failed = np.zeros(len(token_ids), np.bool_)
    most = int(sampling.num_logprobs.max(initial=-1))
    if most < 0:
        return StepResult(token_ids, None, None, None, failed)
    places = np.arange(most, dtype=np.int32)
    own = mix(contexts ^ token_ids.astype(np.uint64)) % np.uint64(1000)
    logprobs = -own.astype(np.float32) / np.float32(100)
    top_ids = np.where(
        places[None, :] < sampling.num_logprobs[:, None], (drawn[:, None] + places) % vocab_size, -1
    ).astype(np.int32)
    top_logprobs = np.broadcast_to(-places.astype(np.float32), top_ids.shape).copy()
    return StepResult(token_ids, logprobs, top_ids, top_logprobs, failed)
