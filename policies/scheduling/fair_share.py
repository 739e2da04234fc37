"""Fair share: of those who wait, the tenant that was served least goes first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv 2401.00588): a counter per tenant of weighted input tokens, charged when a request starts, and
output tokens, charged as they are drawn. A tenant that comes back after a pause is lifted to the
least counter of those who wait, so that nobody saves up a claim. Between two tenants that both
have requests waiting all the time, the service differs by at most twice the larger of the weighted
longest prompt and the weighted tokens that run at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headrace.types import RequestView, SchedulerView
from headrace.types.units import Bounds


class FairShare:
    name: ClassVar[str] = "fair_share"

    @dataclass(frozen=True, slots=True)
    class Options:
        input_weight: Annotated[float, Bounds(0.0, None)] = 1.0
        """What a prompt token counts."""
        output_weight: Annotated[float, Bounds(0.0, None)] = 2.0
        """What a generated token counts."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()
        self._lifts: dict[str, float] = {}
        """What each tenant's counter has above its service since the engine started."""
        self._waiting: set[str] = set()
        self._level = 0.0
        """The counter of whoever was to be served next."""

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        queues: dict[str, deque[RequestView]] = {}
        for request in sorted(waiting, key=lambda request: request.arrival_time):
            queues.setdefault(request.tenant, deque()).append(request)
        self._lift(queues.keys() - self._waiting, queues.keys() & self._waiting, view)
        self._waiting = set(queues)
        self._forget(view)
        turns = [
            (self._counter(tenant, view), queue[0].arrival_time, tenant)
            for tenant, queue in queues.items()
        ]
        if turns:
            self._level = min(turns)[0]
        heapq.heapify(turns)
        order: list[RequestView] = []
        while turns:
            counter, _, tenant = turns[0]
            request = queues[tenant].popleft()
            order.append(request)
            if queues[tenant]:
                counter += self._options.input_weight * request.num_prompt_tokens
                heapq.heapreplace(turns, (counter, queues[tenant][0].arrival_time, tenant))
            else:
                heapq.heappop(turns)
        return order

    def next_decision_at(self, view: SchedulerView) -> float | None:
        return None

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(
            reversed(running),
            key=lambda request: (self._counter(request.tenant, view), request.arrival_time),
        )

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget

    def _counter(self, tenant: str, view: SchedulerView) -> float:
        lift = self._lifts.get(tenant)
        return self._level if lift is None else self._served(tenant, view) + lift

    def _served(self, tenant: str, view: SchedulerView) -> float:
        service = view.tenants.get(tenant)
        if service is None:
            return 0.0
        return (
            self._options.input_weight * service.input_tokens
            + self._options.output_weight * service.output_tokens
        )

    def _lift(self, came: set[str], stayed: set[str], view: SchedulerView) -> None:
        """Give tenants that had nothing waiting no claim on what was served meanwhile.

        One that this policy has not met starts level with the others, whatever it had before.
        """
        level = min([self._counter(tenant, view) for tenant in stayed], default=self._level)
        for tenant in came:
            lift = level - self._served(tenant, view)
            self._lifts[tenant] = max(lift, self._lifts.get(tenant, lift))

    def _forget(self, view: SchedulerView) -> None:
        """Keep no lift of tenants that the engine has forgotten."""
        if len(self._lifts) > 2 * len(view.tenants) + len(self._waiting):
            known = view.tenants.keys() | self._waiting
            self._lifts = {name: lift for name, lift in self._lifts.items() if name in known}
