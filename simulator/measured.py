"""Step times interpolated between the samples of a profile, where the formula alone would be too coarse.

Decodes: piecewise linear in the rows per sequence between the contexts that were measured, and in the
number of sequences between those that were. Steps with chunks of prompts: the formula, corrected by what
it missed at chunks of that size. Beyond the samples the formula's slopes go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.step_time import StepTimeFormula

Floats = NDArray[np.float64]


class MeasuredStepTime:
    """Seconds of a step, never less for more KV rows."""

    def __init__(
        self,
        samples: Sequence[Mapping[str, float]],
        formula: StepTimeFormula,
        overhead: StepTimeFormula,
    ) -> None:
        """`overhead` is added to what the device takes: the engine's own part."""
        self._formula = formula
        self._overhead = overhead
        decodes: dict[int, dict[float, float]] = {}
        missed: dict[int, list[float]] = {}
        for sample in samples:
            tokens, count = int(sample["prefill_tokens"]), int(sample["sequences"])
            rows = int(sample["kv_rows"])
            if tokens == 0:
                decodes.setdefault(count, {})[rows / count] = sample["seconds"]
            elif count == 1:
                said = formula.seconds(tokens, count, rows)
                missed.setdefault(tokens, []).append(sample["seconds"] / said)
        self._counts = sorted(decodes)
        self._lines = [_line(decodes[count]) for count in self._counts]
        self._chunks = np.array(sorted(missed), float)
        self._corrections = np.array([np.mean(missed[int(size)]) for size in self._chunks])

    def seconds(self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: Any) -> Any:
        """Return a step's seconds; of an array of KV rows, those of each."""
        extra = self._overhead.seconds(num_prefill_tokens, num_sequences, 0)
        if num_prefill_tokens or not self._counts:
            said = self._formula.seconds(num_prefill_tokens, num_sequences, num_kv_rows)
            return said * self._correction(num_prefill_tokens) + extra
        rows = np.atleast_1d(np.asarray(num_kv_rows, float))
        found = self._decode_seconds(num_sequences, rows) + extra
        return found if np.ndim(num_kv_rows) else float(found[0])

    def _correction(self, num_prefill_tokens: int) -> float:
        if not len(self._chunks):
            return 1.0
        return float(np.interp(num_prefill_tokens, self._chunks, self._corrections))

    def _decode_seconds(self, num_sequences: int, rows: Floats) -> Floats:
        counts = self._counts
        above = int(np.searchsorted(counts, num_sequences))
        if above < len(counts) and counts[above] == num_sequences:
            return self._at(above, num_sequences, rows)
        if above == 0 or above == len(counts):
            place = min(above, len(counts) - 1)
            more = num_sequences - counts[place]
            apart = more * self._formula.seconds_per_sequence
            found: Floats = np.maximum(self._at(place, num_sequences, rows) + apart, 0.0)
            return found
        low, high = counts[above - 1], counts[above]
        share = (num_sequences - low) / (high - low)
        lower = self._at(above - 1, num_sequences, rows)
        return lower + share * (self._at(above, num_sequences, rows) - lower)

    def _at(self, place: int, num_sequences: int, rows: Floats) -> Floats:
        """Return what so many rows a sequence take on the line of a measured number of sequences."""
        contexts, seconds = self._lines[place]
        each = rows / num_sequences
        beyond = np.maximum(each - contexts[-1], 0.0) * self._counts[place]
        beyond *= self._formula.seconds_per_kv_row
        found: Floats = np.interp(each, contexts, seconds) + beyond
        return found


def _line(points: Mapping[float, float]) -> tuple[Floats, Floats]:
    contexts = np.array(sorted(points))
    seconds = np.array([points[context] for context in contexts])
    return contexts, np.maximum.accumulate(seconds)
