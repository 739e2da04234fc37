"""Session: whatever the caller says belongs together goes to one replica (rendezvous hashing).

The session is the X-Session-ID header, else the body's `user`, and belongs to a tenant. A request without
one goes where the fewest tokens are in flight. A replica that leaves takes only its own sessions with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.policies.routing.turns import Turns, rendezvous_weight
from headrace.types import ReplicaView, RoutingRequest


class Session:
    name: ClassVar[str] = "session"

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        if not request.session:
            return self._turns.least(request.model, replicas, lambda replica: replica.num_tokens)
        tenant = request.tenant.encode("utf-8", "surrogatepass")
        session = request.session.encode("utf-8", "surrogatepass")
        key = len(tenant).to_bytes(8, "little") + tenant + session
        return max(replicas, key=lambda replica: rendezvous_weight(key, replica.id)).id
