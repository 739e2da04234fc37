"""How fast a machine was from moment to moment, by the steps of a server on it: for fidelity.py.

A processor that clocks its vector units by what its neighbours do is a third slower in one second than in the
next. Work is time at the speed of a profile: a trace is simulated with its arrivals in work, and what came of
it is read in time again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.load.recording import RecordedStep
from headrace.step_time import StepTime

WINDOW_SECONDS = 0.5
_FEWEST_SECONDS = 0.05
"""Of steps, for a window to say something; else it is as fast as the one before."""
_LONGEST_GAP_SECONDS = 0.005
"""Between two steps that follow each other; after more there was nothing to do."""
Floats = NDArray[np.float64]


class MachineSpeed:
    """Turns time since `start` into work and back."""

    def __init__(
        self, steps: Sequence[RecordedStep], served: StepTime, device: StepTime, start: float
    ) -> None:
        """`served`: what steps take by the profile with what passes between them, `device`: without it."""
        count = 1 + max((int((step.end - start) // WINDOW_SECONDS) for step in steps), default=0)
        spent, expected = np.zeros(count), np.zeros(count)
        edges, before = WINDOW_SECONDS * np.arange(count + 1), 0.0
        for step in steps:
            counts = (step.num_prefill_tokens, step.num_sequences, step.num_kv_rows)
            end = step.end - start
            gap = max(0.0, end - step.seconds - before)
            follows = gap < _LONGEST_GAP_SECONDS
            seconds = step.seconds + gap if follows else step.seconds
            if seconds <= 0:
                continue
            inside = np.diff(np.clip(edges, end - seconds, end))  # its seconds in each window
            spent += inside
            expected += inside / seconds * (served if follows else device).seconds(*counts)
            before = end
        self.factor = float(spent.sum() / expected.sum()) if expected.any() else 1.0
        """How many times as long as by the profile steps took, in all."""
        factors, last = [], self.factor
        for seconds, by_profile in zip(spent.tolist(), expected.tolist(), strict=True):
            last = seconds / by_profile if seconds >= _FEWEST_SECONDS else last
            factors.append(last)
        self.slowest, self.fastest = max(factors), min(factors)
        self._times = edges
        self._work = np.concatenate([[0.0], np.cumsum(WINDOW_SECONDS / np.array(factors))])

    def work_at(self, time: float) -> float:
        """Return how much work the machine could have done until a time. Beyond the last step: as overall."""
        beyond = max(0.0, time - float(self._times[-1]))
        return float(np.interp(time, self._times, self._work)) + beyond / self.factor

    def time_at(self, work: Floats) -> Floats:
        """Return when so much work was done; NaN stays NaN."""
        beyond = np.maximum(0.0, work - self._work[-1]) * self.factor
        found: Floats = np.interp(work, self._work, self._times) + beyond
        return found
