"""Round robin: the replica after the last one, in order of id, for each model by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.policies.routing.turns import Turns
from headrace.types import ReplicaView, RoutingRequest


class RoundRobin:
    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return self._turns.next(request.model, (replica.id for replica in replicas))
