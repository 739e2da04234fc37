"""Somewhere a request can run: a client of an engine or of another server, and whether to send there now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from headrace.config import ReplicaEntry
from headrace.engine.client import EngineClient
from headrace.gateway.breaker import CircuitBreaker

if TYPE_CHECKING:
    from headrace.gateway.upstream import Upstream

ReplicaState = Literal["starting", "ready", "draining", "failed", "stopped"]


@dataclass(slots=True, eq=False)
class Replica:
    """One of the places that serve a model. `entry` is how the configuration describes it."""

    id: str
    """Unique in the gateway."""
    model_name: str
    client: EngineClient | Upstream
    entry: ReplicaEntry = ReplicaEntry()
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    is_draining: bool = False
    """What runs there may finish; nothing new is sent."""
    _restarts_seen: int = 0

    @property
    def state(self) -> ReplicaState:
        """What operators and policies are told."""
        if self.is_draining and self.client.state != "stopped":
            return "draining"
        if self.client.state == "ready" and not self._current_breaker().is_closed:
            return "failed"
        return self.client.state

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def takes_requests(self, now: float) -> bool:
        """Whether requests may reach it, if only one at a time as a trial: who asks for none of these
        would never find out that it is well again.
        """
        is_up = not self.is_draining and self.client.state == "ready"
        return is_up and self._current_breaker().state(now) != "open"

    def can_serve(self, now: float) -> bool:
        """Whether a request may be sent there now; one that failed may get a trial."""
        is_up = not self.is_draining and self.client.state == "ready"
        return is_up and self._current_breaker().allows(now)

    def _current_breaker(self) -> CircuitBreaker:
        """Return the breaker, closed anew where the engine was started again: those failures are over."""
        restarts = self.client.restarts_total
        if restarts != self._restarts_seen:
            self._restarts_seen = restarts
            self.breaker.succeeded(is_trial=True)
        return self.breaker

    @property
    def upstream(self) -> Upstream | None:
        """The other server, where it is one."""
        return cast("Upstream", self.client) if self.entry.kind == "http" else None

    @property
    def failure(self) -> str | None:
        """Why it is not ready, where something went wrong."""
        if self.client.failure or self.breaker.is_closed:
            return self.client.failure
        return "it failed several requests in a row and is left alone for a while"
