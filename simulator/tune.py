"""Searches the engine settings and the policy that serve a trace best: the most goodput.

Coordinate search over grids: the chunk budget, the number of sequences and the policy are changed one at
a time from the best known, until no change helps. Every point is one simulation of the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import Choice
from headrace.load.report import ServiceLevel
from headrace.simulator.figures import figures
from headrace.simulator.simulation import Setup, simulate, with_changes
from headrace.simulator.trace import Trace

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (8, 16, 32, 64, 128, 256, 512)
POLICIES = ("fcfs", "shortest_first", "fair_share", "deficit_prefix", "slo")


@dataclass(frozen=True, slots=True)
class Point:
    """Settings to try."""

    max_batched_tokens: int
    max_num_sequences: int
    scheduling: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A point and the figures of its simulation."""

    point: Point
    figures: Mapping[str, Any]

    @property
    def score(self) -> tuple[float, float]:
        """The goodput, and of equals the one whose 90th percentile of TTFT is lower."""
        ttft = self.figures["latency_seconds"]["ttft"]
        return self.figures["goodput_requests_per_second"], -(ttft["p90"] if ttft else 0.0)


def tune(
    setup: Setup,
    trace: Trace,
    level: ServiceLevel,
    *,
    policies: Sequence[str] = POLICIES,
    report: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """Return every point tried, the best first; the first one tried is the setup itself."""
    known: dict[Point, Tried] = {}

    def attempt(point: Point) -> Tried:
        if point not in known:
            known[point] = _try(setup, trace, level, point)
            report(known[point])
        return known[point]

    settings = setup.settings
    best = attempt(
        Point(
            settings.max_batched_tokens,
            settings.max_num_sequences,
            setup.choice("scheduling").use,
        )
    )
    while True:
        before = best
        for policy in policies:
            best = max(best, attempt(replace(best.point, scheduling=policy)), key=_score)
        best = _climb(best, "max_batched_tokens", BUDGETS, attempt)
        best = _climb(best, "max_num_sequences", SEQUENCES, attempt)
        if best is before:
            return sorted(known.values(), key=_score, reverse=True)


def _score(tried: Tried) -> tuple[float, float]:
    return tried.score


def _climb(best: Tried, name: str, grid: Sequence[int], attempt: Callable[[Point], Tried]) -> Tried:
    """Go up, then down, the grid from the best point while that helps."""
    for values in (grid, grid[::-1]):
        is_up = values is grid
        for value in values:
            now = getattr(best.point, name)
            if (value > now) != is_up or value == now:
                continue
            changes: dict[str, Any] = {name: value}
            tried = attempt(replace(best.point, **changes))
            if _score(tried) <= _score(best):
                break
            best = tried
    return best


def _try(setup: Setup, trace: Trace, level: ServiceLevel, point: Point) -> Tried:
    changed = with_changes(
        setup,
        max_batched_tokens=point.max_batched_tokens,
        max_num_sequences=point.max_num_sequences,
    )
    configured = setup.choice("scheduling")
    options = configured.options if configured.use == point.scheduling else {}
    changed = replace(
        changed, choices={**setup.choices, "scheduling": Choice(point.scheduling, options)}
    )
    return Tried(point, figures(simulate(changed, trace), point.scheduling, level))
