"""Somewhere a request can run: an engine client, and the model it serves."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.client import EngineClient


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the places that serve a model. What changes is the client's."""

    id: str
    """Unique in the gateway."""
    model_name: str
    client: EngineClient

    @property
    def is_ready(self) -> bool:
        return self.client.state == "ready"
