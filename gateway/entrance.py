"""How a request comes in: its ticket waits at the gate until every admission policy agrees."""

from __future__ import annotations

import anyio

from headrace.gateway.admission import Ticket
from headrace.gateway.call import Call
from headrace.gateway.state import GatewayState
from headrace.types import AdmissionView, TicketView

_ASK_AGAIN_SECONDS = 0.02


async def pass_gate(state: GatewayState, ticket: Ticket, view: TicketView) -> None:
    """Wait until every admission policy lets the ticket in. Raises the refusal."""
    while True:
        load = AdmissionView(
            replicas=state.router.views(view.model),
            queued_requests=state.admission.num_waiting,
        )
        if state.admission.judge(ticket, view, load, state.clock.now()):
            return
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
        max_output_tokens=call.num_choices
        * sum(each.sampling.max_tokens or 0 for each in requests),
        num_choices=len(requests) * call.num_choices,
    )
