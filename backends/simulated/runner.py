"""A Runner without tensors: each step costs what the step-time formula says and draws made-up tokens.

Tokens depend on seed and position only, so a simulated run repeats exactly. On a clock that can be
advanced (headrace.testing.FakeClock) a step takes virtual time; on a real one it sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.interfaces import Clock
from headrace.step_time import StepTimeFormula
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    SamplingBatch,
    StepResult,
    TokenMasks,
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """What a step costs on the pretended device, and how much memory it has."""

    step_time: StepTimeFormula
    weight_bytes: int = 0
    memory_bytes: int = 1 << 40


class SimulatedRunner:
    """What the engine drives where only time and memory matter."""

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
        assert not self._is_closed, "the runner is closed"
        return SimulatedStep(self, batch)

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

    def wait(self, batch: ForwardBatch) -> None:
        """Let the time pass that the step takes."""
        counts = np.diff(batch.query_starts)
        seconds = self._device.step_time.seconds(
            int(counts[counts > 1].sum()), len(counts), int(batch.kv_lens[0].sum())
        )
        advance = getattr(self._clock, "advance", None)
        if advance is not None:
            advance(seconds)
        elif seconds > 0:
            time.sleep(seconds)

    def contexts(self, batch: ForwardBatch) -> NDArray[np.uint64]:
        """Return a number per sample row that the drawn token depends on, seed apart. [R]"""
        return np.asarray(batch.sampling.positions, np.uint64)


class SimulatedStep:
    """A step that is done when its time has passed."""

    def __init__(self, runner: SimulatedRunner, batch: ForwardBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._has_sampled = False

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert not self._has_sampled, "sample is called once"
        self._has_sampled = True

    def result(self) -> StepResult:
        assert self._has_sampled, "result comes after sample"
        contexts = self._runner.contexts(self._batch)
        self._runner.wait(self._batch)
        return _draw(contexts, self._batch.sampling, self._runner.vocab_size)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-spread 64-bit numbers, equal for equal inputs (splitmix64, Steele et al. 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _draw(contexts: NDArray[np.uint64], sampling: SamplingBatch, vocab_size: int) -> StepResult:
    """Return made-up tokens: greedy rows ignore the seed; what a bias of -inf forbids is not drawn."""
    seeds = np.where(sampling.temperature > 0, sampling.seeds, np.uint64(0))
    drawn = (mix(contexts ^ mix(seeds)) % np.uint64(vocab_size)).astype(np.int32)
    for row in range(len(drawn)):
        start, end = sampling.bias_starts[row], sampling.bias_starts[row + 1]
        if start == end:
            continue
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
