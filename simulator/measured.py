"""Step times interpolated between the samples of a profile, where the formula alone would be too coarse.

Decodes: piecewise linear in the rows per sequence between the contexts that were measured, and in the
number of sequences between those that were. Chunks of prompts: linear in the size of the chunk and in the
context before it, which attention makes dearer by the token; the formula's slopes for the decodes beside
it. Beyond the samples the slopes go on. Small decodes may have been measured beside the engine's own work too.
"""

from __future__ import annotations

from bisect import bisect_left
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
        gaps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`overhead` is the engine's own part, added to what the device takes.

        `gaps`: numbers of sequences, rising, and the seconds between two steps of so many decodes in a
        server, which count where they are more than the overhead. Small decodes that were measured beside the
        engine's part too (`beside_seconds`) take that where it is shorter than one after the other; a gap of
        next to nothing says that the server chose so, and nothing of the time between steps.
        """
        self._formula = formula
        self._overhead = overhead
        kept = [(n, gap) for n, gap in gaps if gap > overhead.seconds(0, n, 0) / 2] or [(0, 0.0)]
        self._gap_counts, self._gap_seconds = [n for n, _ in kept], [gap for _, gap in kept]
        decodes: dict[int, dict[float, float]] = {}
        beside: dict[int, dict[float, float]] = {}
        chunks: dict[int, dict[float, float]] = {}
        for sample in samples:
            tokens, count = int(sample["prefill_tokens"]), int(sample["sequences"])
            rows = int(sample["kv_rows"])
            if tokens == 0:
                decodes.setdefault(count, {})[rows / count] = sample["seconds"]
                if "beside_seconds" in sample:
                    beside.setdefault(count, {})[rows / count] = sample["beside_seconds"]
            elif count == 1:
                chunks.setdefault(tokens, {})[rows - tokens] = sample["seconds"]
        self._decodes = _Decodes(decodes, formula) if decodes else None
        self._beside = _Decodes(beside, formula) if beside else None
        self._chunks = sorted(chunks)
        self._chunk_lines = [_line(chunks[size]) for size in self._chunks]

    def seconds(self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: Any) -> Any:
        """Return a step's seconds; of an array of KV rows, those of each."""
        between = self._between(num_sequences)
        if num_prefill_tokens and self._chunks:
            found = self._chunk_seconds(num_prefill_tokens, num_sequences, num_kv_rows)
            return (found if np.ndim(num_kv_rows) else float(found)) + between
        if num_prefill_tokens or self._decodes is None:
            formula = self._formula.seconds(num_prefill_tokens, num_sequences, num_kv_rows)
            return formula + between
        rows = np.atleast_1d(np.asarray(num_kv_rows, float))
        found = self._decodes.seconds(num_sequences, rows) + between
        beside = self._seconds_beside(num_sequences, rows)
        if beside is not None:
            found = np.minimum(found, beside)
        return found if np.ndim(num_kv_rows) else float(found[0])

    def runs_beside(self, num_sequences: int, num_kv_rows: int) -> bool:
        """Whether such decodes are computed beside the engine's own work, each launched a step ahead."""
        rows = np.array([num_kv_rows], float)
        beside = self._seconds_beside(num_sequences, rows)
        return beside is not None and bool(beside[0] <= self.seconds(0, num_sequences, rows)[0])

    def _seconds_beside(self, num_sequences: int, rows: Floats) -> Floats | None:
        if self._beside is None or num_sequences > self._beside.counts[-1]:
            return None
        return self._beside.seconds(num_sequences, rows)

    def _between(self, num_sequences: int) -> float:
        """What passes between two steps; for more sequences than in any gap, as the overhead grows."""
        own: float = self._overhead.seconds(0, num_sequences, 0)
        count = min(num_sequences, self._gap_counts[-1])
        gap = float(np.interp(count, self._gap_counts, self._gap_seconds))
        return own + max(0.0, gap - self._overhead.seconds(0, count, 0))

    def _chunk_seconds(self, num_tokens: int, num_sequences: int, num_kv_rows: Any) -> Any:
        """Return what a chunk takes, the rows before it shared evenly with the sequences beside it.

        Which sequence has how many rows is not known here, nor how many of them have prompts.
        """
        context = np.maximum(num_kv_rows - num_tokens, 0) / num_sequences
        others = num_sequences - 1
        beside = others * (
            self._formula.seconds_per_sequence + context * self._formula.seconds_per_kv_row
        )
        sizes = self._chunks
        above = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        if sizes[above] == num_tokens or len(sizes) == 1:
            more = (num_tokens - sizes[above]) * self._formula.seconds_per_prefill_token
            return _along(self._chunk_lines[above], context) + more + beside
        above = max(above, 1)
        low, high = sizes[above - 1], sizes[above]
        lower = _along(self._chunk_lines[above - 1], context)
        upper = _along(self._chunk_lines[above], context)
        found = lower + (num_tokens - low) / (high - low) * (upper - lower)
        return np.maximum(found, lower if num_tokens > low else 0.0) + beside


class _Decodes:
    """Decodes by number of sequences and context."""

    def __init__(
        self, samples: Mapping[int, Mapping[float, float]], formula: StepTimeFormula
    ) -> None:
        self.counts = sorted(samples)
        self._lines = [_line(samples[count]) for count in self.counts]
        self._formula = formula

    def seconds(self, num_sequences: int, rows: Floats) -> Floats:
        counts = self.counts
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
        beyond = np.maximum(each - contexts[-1], 0.0) * self.counts[place]
        beyond *= self._formula.seconds_per_kv_row
        found: Floats = np.interp(each, contexts, seconds) + beyond
        return found


def _along(line: tuple[Floats, Floats], context: Any) -> Any:
    """Return the seconds at a context, on the last piece's slope beyond the last sample."""
    contexts, seconds = line
    found = np.interp(context, contexts, seconds)
    if len(contexts) > 1:
        slope = (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2])
        found = found + slope * np.maximum(context - contexts[-1], 0.0)
    return found


def _line(points: Mapping[float, float]) -> tuple[Floats, Floats]:
    contexts = np.array(sorted(points))
    seconds = np.array([points[context] for context in contexts])
    return contexts, np.maximum.accumulate(seconds)
