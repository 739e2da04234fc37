"""GET /v1/models and /v1/models/{id}: what can be asked for now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.gateway.errors import JSONBytes
from headrace.gateway.identity import identity_of
from headrace.gateway.readiness import check_any_ready, groups, is_ready, not_ready, ready_card
from headrace.gateway.router import ModelGroup
from headrace.gateway.state import GatewayState
from headrace.types import ModelCard


@dataclass(frozen=True, slots=True)
class ListModels:
    """GET /v1/models: the models that are ready, of those the caller may use."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_any_ready(self.state)
        identity, now = identity_of(scope), self.state.clock.now()
        data = [
            described(group, now)
            for group in groups(self.state)
            if is_ready(group, now) and identity.may_use(group.name)
        ]
        await JSONBytes({"object": "list", "data": data})(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ShowModel:
    """GET /v1/models/{id}; an id may have slashes."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        group = self.state.router.resolve(scope["path_params"]["model"])
        identity_of(scope).check_model(group.name)
        now = self.state.clock.now()
        if not is_ready(group, now):
            raise not_ready([group], self.state)
        await JSONBytes(described(group, now))(scope, receive, send)


def described(group: ModelGroup, now: float) -> dict[str, Any]:
    """Return a model that is ready, by its card; of one that only other servers have, what they say."""
    card = ready_card(group, now)
    if card is not None:
        return model_object(card)
    known = [replica.upstream.max_model_len for replica in group.replicas if replica.upstream]
    lengths = [length for length in known if length is not None]
    shown: dict[str, Any] = {
        "id": group.name,
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "root": group.name,
    }
    return {**shown, "max_model_len": min(lengths)} if lengths else shown


def model_object(card: ModelCard) -> dict[str, Any]:
    """Return a model as OpenAI describes one, and what a client needs to stay within its context."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "root": card.name,
        "max_model_len": card.max_model_len,
    }
