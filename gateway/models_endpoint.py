"""GET /v1/models and /v1/models/{id}: what can be asked for now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.gateway.errors import JSONBytes
from headrace.gateway.identity import identity_of
from headrace.gateway.readiness import check_any_ready, groups, ready_card, require_card
from headrace.gateway.state import GatewayState
from headrace.types import ModelCard


@dataclass(frozen=True, slots=True)
class ListModels:
    """GET /v1/models: the models that are ready, of those the caller may use."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_any_ready(self.state)
        cards = [ready_card(group) for group in groups(self.state)]
        identity = identity_of(scope)
        data = [model_object(card) for card in cards if card and identity.may_use(card.name)]
        await JSONBytes({"object": "list", "data": data})(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ShowModel:
    """GET /v1/models/{id}; an id may have slashes."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        group = self.state.router.resolve(scope["path_params"]["model"])
        identity_of(scope).check_model(group.name)
        card = require_card(group, self.state)
        await JSONBytes(model_object(card))(scope, receive, send)


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
