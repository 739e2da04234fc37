"""Strict priority: a lower number runs first, equal ones in order of arrival.

Strict means that a steady stream of urgent requests starves the others; no request ages upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.types import RequestView, SchedulerView


class PriorityFirst:
    name: ClassVar[str] = "priority"

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        return sorted(waiting, key=_urgency)

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(reversed(running), key=_urgency)

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget


def _urgency(request: RequestView) -> tuple[int, float]:
    return request.priority, request.arrival_time
