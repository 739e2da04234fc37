"""What the entry point names: a policy and the hook that registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import headrace
from headrace.types import RequestView, SchedulerView


class Waterwheel:
    """Tenants take turns, one request each, in order of arrival."""

    name: ClassVar[str] = "waterwheel"

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        turns: dict[str, int] = {}
        turn_of = {}
        for request in sorted(waiting, key=lambda each: each.arrival_time):
            turn_of[id(request)] = turns[request.tenant] = turns.get(request.tenant, -1) + 1
        return sorted(waiting, key=lambda each: (turn_of[id(each)], each.arrival_time))

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(running, key=lambda request: request.arrival_time)

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget


@headrace.hookimpl
def headrace_register_scheduling() -> list[type[Waterwheel]]:
    return [Waterwheel]
