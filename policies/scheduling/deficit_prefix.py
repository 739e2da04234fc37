"""Fair among tenants, and local within what fairness allows: the longest cached prefix goes first.

Deficit longest prefix match of Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (arXiv
2501.14312): requests in order of the prefix that the cache holds of them, as long as their tenant
has some of its quantum left; when nobody who waits has, everybody who waits is given another
quantum. Uncached prompt tokens and generated tokens use it up. A tenant that has paused keeps at
most one quantum.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headrace.types import RequestView, SchedulerView
from headrace.types.units import Bounds


class DeficitPrefix:
    name: ClassVar[str] = "deficit_prefix"
    needs_prefixes: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        quantum: Annotated[int, Bounds(1, None)] = 4096
        """Weighted tokens given at a time: small is fair in the short run, large keeps prefixes together."""
        input_weight: Annotated[float, Bounds(0.0, None)] = 1.0
        """What a prompt token that no cache held counts."""
        output_weight: Annotated[float, Bounds(0.0, None)] = 2.0
        """What a generated token counts."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()
        self._granted: dict[str, float] = {}
        """What each tenant may have been served when its quantum is used up."""

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        tenants = {request.tenant for request in waiting}
        self._forget(tenants, view)
        quantum = float(self._options.quantum)
        left = {tenant: self._left(tenant, view) for tenant in tenants}
        if left and max(left.values()) <= 0:
            rounds = 1 + int(-max(left.values()) // quantum)
            for tenant in tenants:
                left[tenant] += rounds * quantum
                self._granted[tenant] += rounds * quantum
        queue = sorted(waiting, key=lambda r: (-r.num_cached_tokens, r.arrival_time))
        return self._in_rounds(queue, left)

    def _in_rounds(
        self, queue: Sequence[RequestView], left: Mapping[str, float]
    ) -> list[RequestView]:
        """Return the queue in the order of rounds, those of one round as they are in the queue.

        In a round each tenant goes on until nothing is left to it; then all who still wait are given
        as many quanta as the best of them needs. `given` is what each has had in this way.
        """
        quantum = float(self._options.quantum)
        places: dict[str, deque[int]] = {}
        for place, request in enumerate(queue):
            places.setdefault(request.tenant, deque()).append(place)
        turns = [(-left[tenant], tenant) for tenant in places]
        heapq.heapify(turns)
        given = 0.0
        order: list[RequestView] = []
        while turns:
            most = given - turns[0][0]
            if most <= 0:
                given += (1 + int(-most // quantum)) * quantum
            taken: list[int] = []
            go_on: list[tuple[float, str]] = []
            while turns and given - turns[0][0] > 0:
                overdrawn, tenant = heapq.heappop(turns)
                mine = places[tenant]
                while mine and given - overdrawn > 0:
                    overdrawn += self._cost(queue[mine[0]])
                    taken.append(mine.popleft())
                if mine:
                    go_on.append((overdrawn, tenant))
            for turn in go_on:
                heapq.heappush(turns, turn)
            order += [queue[place] for place in sorted(taken)]
        return order

    def next_decision_at(self, view: SchedulerView) -> float | None:
        return None

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return max(
            reversed(running),
            key=lambda request: (-self._left(request.tenant, view), request.arrival_time),
        )

    def prefill_budget(self, view: SchedulerView) -> int:
        return view.token_budget

    def _cost(self, request: RequestView) -> float:
        uncached = max(1, request.num_prompt_tokens - request.num_cached_tokens)
        return max(1.0, self._options.input_weight * uncached)

    def _left(self, tenant: str, view: SchedulerView) -> float:
        """Return what is left of a tenant's quantum, below 0 where it was overdrawn."""
        served = 0.0
        service = view.tenants.get(tenant)
        if service is not None:
            served = (
                self._options.input_weight * (service.input_tokens - service.cached_tokens)
                + self._options.output_weight * service.output_tokens
            )
        most = served + self._options.quantum
        granted = self._granted[tenant] = min(self._granted.get(tenant, most), most)
        return granted - served

    def _forget(self, waiting: set[str], view: SchedulerView) -> None:
        if len(self._granted) > 2 * len(view.tenants) + len(waiting):
            known = view.tenants.keys() | waiting
            self._granted = {name: sum_ for name, sum_ in self._granted.items() if name in known}
