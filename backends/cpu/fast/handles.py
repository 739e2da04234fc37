"""What a step gives to who asked for it: tokens drawn from logits, or the best ones that it found itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.backends.cpu.draw import Draw
from headrace.backends.cpu.fast.pool import ThreadPool
from headrace.backends.cpu.fast.sampling import FastSampler
from headrace.backends.cpu.fast.step_memory import StepMemory
from headrace.types import SamplingBatch, StepResult, TokenMasks


def wants_best_alone(sampling: SamplingBatch) -> bool:
    """Whether every row wants its best token and nothing else, masks aside."""
    return not (
        sampling.temperature.any()
        or len(sampling.history_ids)
        or len(sampling.bias_ids)
        or sampling.num_logprobs.max(initial=-1) >= 0
        or sampling.score_token_ids.max(initial=-1) >= 0
    )


@dataclass(frozen=True, slots=True)
class Picked:
    """The best tokens of a step that gave no logits."""

    draw: Draw
    complete: Callable[[], None]
    """Computes the logits after all."""

    def is_overruled(self, masks: TokenMasks | None) -> bool:
        """Whether masks ask for logits, which there are then."""
        if masks is None or len(masks.rows) == 0:
            return False
        self.complete()
        return True


class FastStepHandle:
    """A step whose forward has run. Implements headrace.interfaces.StepHandle."""

    def __init__(
        self,
        sampler: FastSampler,
        logits: tuple[int, int, int],
        sampling: SamplingBatch,
        num_threads: int,
        note: Callable[[], None],
        picked: Picked | None,
    ) -> None:
        self._note = note
        self._picked = picked
        self._sampler = sampler
        self._num_threads = num_threads
        self._logits = logits
        self._sampling = sampling
        self._result: StepResult | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert self._result is None, "sample is called once per step"
        if self._picked is not None and not self._picked.is_overruled(masks):
            self._result = self._picked.draw.result()
        else:
            self._result = self._sampler.sample(
                self._logits, self._sampling, masks, self._num_threads
            )
        self._note()

    def result(self) -> StepResult:
        assert self._result is not None, "sample comes before result"
        return self._result


class BesideHandle:
    """A step that the workers compute and draw. Implements headrace.interfaces.StepHandle but for `sample`."""

    def __init__(
        self, threads: ThreadPool, step: StepMemory, draw: Draw, note: Callable[[], None]
    ) -> None:
        self._note = note
        self._threads = threads
        self._step = step
        self._draw = draw

    def sample(self, masks: TokenMasks | None = None) -> None:
        raise AssertionError("a step launched beside its caller draws by itself")

    def result(self) -> StepResult:
        self._threads.wait(self._step)
        self._note()
        return self._draw.result()
