"""First come, first served: the order of arrival; the latest arrival gives way.

A preempted request keeps its arrival time, so it comes back before those that came after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.types import RequestView, SchedulerView


class FirstComeFirstServed:
    name: ClassVar[str] = "fcfs"
    is_order_fixed: ClassVar[bool] = True

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        return sorted(waiting, key=lambda request: request.arrival_time)

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(reversed(running), key=lambda request: request.arrival_time)

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget
