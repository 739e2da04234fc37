"""Priority with ageing: a lower number runs first; waiting moves a request up one level per `ageing`.

Waiting counts alike for everybody, so "priority less levels waited" orders two requests the same way
at any time: it is the order of arrival time plus priority times `ageing`, and never needs renewing.
Nobody waits longer than the difference in priority times `ageing` behind requests that came later.
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
        """Waiting so long is worth one level of priority; null: nothing, so low priorities may starve."""

    def __init__(self, options: Options | None = None) -> None:
        self._ageing = (options or self.Options()).ageing

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        return sorted(waiting, key=self._urgency)

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(reversed(running), key=self._urgency)

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget

    def _urgency(self, request: RequestView) -> tuple[float, float]:
        if self._ageing is None:
            return request.priority, request.arrival_time
        return request.arrival_time + request.priority * self._ageing, request.arrival_time
