"""Priority with ageing: a lower number runs first; waiting moves a request up one level per `ageing`.

Waiting counts alike for everybody, so "priority less levels waited" orders two requests the same way
at any time: it is the order of arrival time plus priority times `ageing`, and needs renewing only
when somebody has waited for `max_wait`. Who has goes before everybody else, in order of arrival: callers choose
their own priorities, and however low a number they send, nobody is passed for longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.types import RequestView, SchedulerView
from headrace.types.units import Seconds


class PriorityFirst:
    name: ClassVar[str] = "priority"
    is_order_fixed: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        ageing: Seconds | None = 30.0
        """Waiting so long is worth one level of priority; null: nothing."""
        max_wait: Seconds | None = 60.0
        """Whoever has waited so long goes first, whatever the priorities; null: nobody does, and without
        `ageing` low priorities may starve."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()
        self._next_late_at: float | None = None

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        max_wait = self._options.max_wait
        if max_wait is not None:
            times = [request.arrival_time + max_wait for request in waiting]
            self._next_late_at = min((time for time in times if time > view.now), default=None)
        return sorted(waiting, key=lambda request: self._turn(request, view.now))

    def next_decision_at(self, view: SchedulerView) -> float | None:
        return self._next_late_at

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(reversed(running), key=lambda request: self._turn(request, view.now))

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget

    def _turn(self, request: RequestView, now: float) -> tuple[bool, float, float]:
        """Return the place in the order: the least goes first and is taken back last."""
        ageing, max_wait = self._options.ageing, self._options.max_wait
        arrival_time = request.arrival_time
        if max_wait is not None and arrival_time + max_wait <= now:
            return False, arrival_time, arrival_time
        if ageing is None:
            return True, request.priority, arrival_time
        return True, arrival_time + request.priority * ageing, arrival_time
