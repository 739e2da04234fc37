"""Shortest first: the fewest prompt tokens that no cache holds, with a bound on waiting.

Short requests no longer wait behind long ones, so the median wait falls; whoever has waited for
`patience` goes before everybody who has not, so the longest wait is bounded too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.types import RequestView, SchedulerView
from headrace.types.units import Seconds


class ShortestFirst:
    name: ClassVar[str] = "shortest_first"
    needs_prefixes: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        patience: Seconds = 10.0
        """Whoever has waited so long goes first, in order of arrival."""

    def __init__(self, options: Options | None = None) -> None:
        self._patience = (options or self.Options()).patience
        self._next_late_at: float | None = None

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        late_before = view.now - self._patience
        in_time = [r.arrival_time for r in waiting if r.arrival_time > late_before]
        self._next_late_at = min(in_time) + self._patience if in_time else None

        def turn(request: RequestView) -> tuple[float, float]:
            if request.arrival_time <= late_before:
                return -1, request.arrival_time
            return _tokens_left(request), request.arrival_time

        return sorted(waiting, key=turn)

    def next_decision_at(self, view: SchedulerView) -> float | None:
        return self._next_late_at

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(reversed(running), key=lambda request: request.arrival_time)

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget


def _tokens_left(request: RequestView) -> int:
    return request.num_prompt_tokens + request.num_output_tokens - request.num_cached_tokens
