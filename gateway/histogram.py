"""Histograms of seconds per model, cheap to fill: one search and two additions each, and no lock.

They are filled for every token of every stream, by the event loop's thread alone. prometheus_client's own
take a lock per number and look through their buckets one after the other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class Counts:
    """One label's numbers."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, the last one without a bound; not cumulated."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a value into the first bucket whose bound it does not exceed."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds


class ModelHistogram(Collector):
    """One metric with the label `model`. Register it where it shall be told."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds`: the buckets' upper bounds in rising order, infinity left out."""
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._shown = [floatToGoString(bound) for bound in (*bounds, INF)]  # type: ignore[no-untyped-call]
        self._models: dict[str, Counts] = {}

    def observe(self, model: str, seconds: float) -> None:
        """Count one value of a model."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = Counts(self._bounds)
        counts.observe(seconds)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric as it is now."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model",))
        for model, counts in list(self._models.items()):
            cumulated = map(float, itertools.accumulate(counts.counts))
            buckets = list(zip(self._shown, cumulated, strict=True))
            family.add_metric((model,), buckets, counts.sum)
        yield family
