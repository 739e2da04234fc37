"""From a valid call to running streams: the model, the gate, the replica, the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio

from headrace.gateway.admission import Ticket
from headrace.gateway.call import Call, TargetModel
from headrace.gateway.readiness import require_card
from headrace.gateway.state import GatewayState
from headrace.types import (
    AdmissionView,
    GenerationRequest,
    RoutingRequest,
    TicketView,
    TokenEvent,
)

_ASK_AGAIN_SECONDS = 0.02


async def find_target(state: GatewayState, model: str | None) -> TargetModel:
    """Return the model a body names (None: the only one), with its text side built."""
    card = require_card(state.router.resolve(model), state)
    return TargetModel(card, await state.texts.get(card))


async def pass_gate(state: GatewayState, ticket: Ticket, view: TicketView) -> None:
    """Wait until every admission policy lets the ticket in. Raises the refusal."""
    load = AdmissionView(queued_requests=state.admission.num_waiting)
    while not state.admission.judge(ticket, view, load, state.clock.now()):  # noqa: ASYNC110
        await anyio.sleep(_ASK_AGAIN_SECONDS)


def admission_view(call: Call, num_body_bytes: int) -> TicketView:
    """Return what the second judgement may know."""
    requests = call.requests
    return TicketView(
        stage="parsed",
        tenant=requests[0].tenant,
        num_body_bytes=num_body_bytes,
        model=call.card.name,
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        max_output_tokens=sum(request.sampling.max_tokens or 0 for request in requests),
        num_choices=len(requests) * call.num_choices,
    )


async def open_stream(
    state: GatewayState, request: GenerationRequest, stack: AsyncExitStack
) -> AsyncIterator[list[TokenEvent]]:
    """Choose a replica and wait until its engine accepts. Leaving `stack` aborts what still runs."""
    routing = RoutingRequest(
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=len(request.prompt_token_ids),
        prefix_hashes=request.prefix_hashes,
    )
    replica = state.router.choose(routing, state.clock.now())
    return await stack.enter_async_context(replica.client.stream(request))
