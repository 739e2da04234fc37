"""Least loaded: the replica with the fewest tokens in flight; equals take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.policies.routing.turns import Turns
from headrace.types import ReplicaView, RoutingRequest


class LeastLoaded:
    name: ClassVar[str] = "least_loaded"

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return self._turns.least(request.model, replicas, lambda replica: replica.num_tokens)
