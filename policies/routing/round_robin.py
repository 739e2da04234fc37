"""Round robin: the replica after the last one, in order of id, for each model by itself.

The last id is remembered rather than a position, so that a replica that leaves or joins does not
make the others skip a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.types import ReplicaView, RoutingRequest


class RoundRobin:
    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._last_ids: dict[str, str] = {}

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        ids = sorted(replica.id for replica in replicas)
        last_id = self._last_ids.get(request.model, "")
        chosen = next((replica_id for replica_id in ids if replica_id > last_id), ids[0])
        self._last_ids[request.model] = chosen
        return chosen
