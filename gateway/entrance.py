"""How a request comes in: its ticket waits at the gate until every admission policy agrees.

A waiting ticket sleeps until something is given back. The head of a lane also asks again at intervals,
because a policy may decide by the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio
from starlette.types import Scope

from headrace.gateway.accounting import RequestRecord
from headrace.gateway.admission import (
    HEAD_ASKS_AGAIN_SECONDS,
    OTHERS_ASK_AGAIN_SECONDS,
    Outcome,
    Ticket,
)
from headrace.gateway.call import Call
from headrace.gateway.expected_output import UNKNOWN_OUTPUT_TOKENS
from headrace.gateway.identity import identity_of
from headrace.gateway.json_body import content_length
from headrace.gateway.state import GatewayState
from headrace.types import GenerationRequest, PromptView, RoutingRequest, TicketView


@dataclass(frozen=True, slots=True)
class Placement:
    """One prompt of an admitted call: what routing knows of it, and where it proposed to send it."""

    request: GenerationRequest
    routing: RoutingRequest
    replica_id: str = ""
    """"" where nobody has been asked yet."""


def arrival_view(scope: Scope) -> TicketView:
    """Return what the first judgement may know."""
    identity = identity_of(scope)
    return TicketView(
        stage="arrival",
        tenant=identity.tenant,
        organization=identity.organization,
        num_body_bytes=content_length(scope),
    )


def parsed_view(
    arrival: TicketView, model: str, routing: Sequence[RoutingRequest], max_output_tokens: int
) -> TicketView:
    """Return what the second judgement may know; `max_output_tokens` of all choices together."""
    return replace(
        arrival,
        stage="parsed",
        model=model,
        num_prompt_tokens=sum(each.num_prompt_tokens for each in routing),
        max_output_tokens=max_output_tokens,
        expected_output_tokens=sum(each.expected_output_tokens for each in routing),
        priority=routing[0].priority,
    )


def routing_request(
    state: GatewayState, request: GenerationRequest, session: str
) -> RoutingRequest:
    """Return what routing may know of one prompt."""
    sampling = request.sampling
    expected = expected_load(state, request.model, request.tenant, sampling.max_tokens or 0)
    return RoutingRequest(
        model=request.model,
        tenant=request.tenant,
        session=session,
        priority=request.priority,
        num_prompt_tokens=len(request.prompt_token_ids),
        prefix_hashes=request.prefix_hashes,
        expected_output_tokens=expected * sampling.n,
    )


def expected_load(state: GatewayState, model: str, tenant: str, max_tokens: int) -> int:
    """Return the output tokens that routing counts for one choice."""
    return state.admission.expected_output.predict(
        model, tenant, max_tokens, unknown=UNKNOWN_OUTPUT_TOKENS
    )


def _reserved(state: GatewayState, request: GenerationRequest, max_model_len: int) -> int:
    """Return the output tokens that limits reserve for one choice.

    Who sets no bound may take all the room there is and takes a little of it: what is expected.
    """
    most = request.sampling.max_tokens or 0
    if len(request.prompt_token_ids) + most < max_model_len:
        return most
    return expected_load(state, request.model, request.tenant, most)


async def admit_call(
    state: GatewayState, ticket: Ticket, arrival: TicketView, call: Call
) -> list[Placement]:
    """Wait until a parsed call may come in. Raises the refusal."""
    routing = [routing_request(state, request, call.session) for request in call.requests]
    if state.admission.is_open:
        return [Placement(*each) for each in zip(call.requests, routing, strict=True)]
    choices = call.num_choices
    most = choices * sum(
        _reserved(state, request, call.card.max_model_len) for request in call.requests
    )
    view = parsed_view(arrival, call.card.name, routing, most)
    predict = state.admission.expected_output.predict
    expected = [
        predict(each.model, each.tenant, each.sampling.max_tokens or 0) for each in call.requests
    ]
    view = replace(
        view,
        num_choices=len(routing) * choices,
        expected_output_tokens=choices * sum(expected),
    )
    if len(routing) > 1:
        prompts = [
            PromptView(each.num_prompt_tokens, choices * tokens, choices)
            for each, tokens in zip(routing, expected, strict=True)
        ]
        view = replace(view, prompts=tuple(prompts))
    await pass_gate(state, ticket, view, routing)
    proposed = ticket.replica_ids or ("",) * len(routing)
    return [Placement(*each) for each in zip(call.requests, routing, proposed, strict=True)]


async def pass_gate(
    state: GatewayState,
    ticket: Ticket,
    view: TicketView,
    routing: Sequence[RoutingRequest] = (),
) -> None:
    """Wait until every admission policy lets the ticket in. Raises the refusal.

    With `routing` a replica is proposed for each prompt, anew each time the ticket is judged, and kept in
    `ticket.replica_ids`. What the store has taken is noted on the ticket even where the caller leaves
    meanwhile, so that it is given back.
    """
    gate = state.admission
    ticket.view = view
    if gate.is_open:
        return
    while True:
        now = state.clock.now()
        charges = None
        if ticket.lane is None or gate.is_head(ticket) or now >= ticket.wait_until:
            proposed = _propose(state, ticket, view, routing, now)
            load = gate.load(state.router.views(view.model), proposed, now)
            charges = gate.decide(ticket, proposed, load, now)
        if charges is not None:
            with anyio.CancelScope(shield=True):
                taken = await gate.store.take(ticket.holder, charges, now)
            gate.conclude(ticket, charges, taken, now)
            return
        await _wait(ticket, gate.is_head(ticket), ticket.wait_until - now)


def _propose(
    state: GatewayState,
    ticket: Ticket,
    view: TicketView,
    routing: Sequence[RoutingRequest],
    now: float,
) -> TicketView:
    """Ask routing where each prompt would go, and say what its replica has seen of it."""
    if not routing:
        return view
    replicas = [state.router.choose(each, now) for each in routing]
    ticket.replica_ids = tuple(replica.id for replica in replicas)
    cached = list(map(state.router.matched_tokens, replicas, routing))
    prompts = tuple(
        replace(prompt, replica_id=replica.id, cached_tokens=tokens)
        for prompt, replica, tokens in zip(view.prompts, replicas, cached, strict=False)
    )
    return replace(
        view, replica_id=ticket.replica_ids[0], cached_tokens=sum(cached), prompts=prompts
    )


async def _wait(ticket: Ticket, is_head: bool, seconds_left: float) -> None:
    """Sleep until it may be worth asking again."""
    woken = anyio.Event()
    ticket.wake = woken.set
    longest = HEAD_ASKS_AGAIN_SECONDS if is_head else OTHERS_ASK_AGAIN_SECONDS
    with anyio.move_on_after(max(0.0, min(longest, seconds_left))):
        await woken.wait()


def settle(state: GatewayState, ticket: Ticket, record: RequestRecord) -> None:
    """Release a ticket with what its request really used, and learn from what it produced.

    A caller that left is charged for the prompt and for what was produced until then; a request that the
    server could not serve, or that a limit refused, for nothing. One that was wrong counts as a request.
    """
    used = record.prompt_tokens + record.completion_tokens
    was_served = record.status < 500 and record.status != 429 or record.completion_tokens > 0
    if record.status == 200:
        for num_tokens in record.choice_tokens():
            state.admission.expected_output.observe(record.model, ticket.view.tenant, num_tokens)
    ticket.settle(Outcome(used, was_served), state.clock.now())
