"""The path of one generation request, the same for chat and completions.

Headers go out only once every prompt was accepted by an engine, so a refusal is still a true status;
from then on a failure is an event. Whatever ends the request, leaving the exit stack aborts what still
runs, the ticket is released and the facts are told, each exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.errors import RequestAborted
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.admission import Ticket
from headrace.gateway.call import Call, Caller, TargetModel
from headrace.gateway.delivery import note_failure
from headrace.gateway.dispatch import find_target
from headrace.gateway.entrance import arrival_view, pass_gate, settle
from headrace.gateway.errors import error_response
from headrace.gateway.identity import identity_of
from headrace.gateway.json_body import decode_body, read_body
from headrace.gateway.middleware import request_ids
from headrace.gateway.openai_schema import GenerationBody
from headrace.gateway.readiness import check_any_ready, ready_card
from headrace.gateway.relay import relayed_headers
from headrace.gateway.relay_body import read_relayed
from headrace.gateway.serving import Serving
from headrace.gateway.state import GatewayState, Limits
from headrace.gateway.tasks import until_disconnected
from headrace.gateway.trace_context import trace_of

Body = TypeVar("Body", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[Body]):
    """An ASGI application for one path: a decoder, and what builds a call from the body."""

    state: GatewayState
    path: str
    decoder: msgspec.json.Decoder[Body]
    build: Callable[[Body, Caller, TargetModel, Limits], Call]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        record = RequestRecord(
            state=state,
            endpoint=self.path,
            request_id=request_ids(scope).internal,
            started_at=state.clock.now(),
            trace=trace_of(scope),
        )
        started = False

        async def tracked_send(message: Any) -> None:
            nonlocal started
            if not started and (limits := ticket.headers()):
                message = {**message, "headers": [*message.get("headers", ()), *limits]}
            started = True
            await send(message)

        with state.admission.take() as ticket:
            try:
                await self._serve(record, ticket, scope, receive, tracked_send)
            except Exception as error:
                note_failure(record, error)
                if not started and not isinstance(error, RequestAborted):
                    await error_response(error)(scope, receive, tracked_send)
            except BaseException:
                record.status, record.error_code = 499, RequestAborted.code
                raise
            finally:
                settle(state, ticket, record)
                record.finish()

    async def _serve(
        self, record: RequestRecord, ticket: Ticket, scope: Scope, receive: Receive, send: Send
    ) -> None:
        state = self.state
        check_any_ready(state)
        arrival = arrival_view(scope)
        await pass_gate(state, ticket, arrival)
        raw = await read_body(scope, receive, state.config.gateway.max_body_bytes)
        caller = Caller(record.request_id, record.started_at, identity_of(scope), session_of(scope))
        headers = relayed_headers(scope) if state.router.has_upstream else {}
        serving = Serving(state, record, ticket, arrival, caller, headers, send)
        await until_disconnected(scope, receive, lambda: self._answer(serving, raw))

    async def _answer(self, serving: Serving, raw: bytes) -> None:
        state, caller = self.state, serving.caller
        relayed = None
        if state.router.has_upstream:
            relayed = read_relayed(raw)
            group = state.router.resolve(relayed.fields.model)
            if group.is_remote or (
                group.has_upstream and ready_card(group, state.clock.now()) is None
            ):
                await serving.elsewhere(relayed, group)
                return
            relayed = relayed if group.has_upstream else None
        body = decode_body(raw, self.decoder)
        target = await find_target(state, body.model)
        caller.identity.check_model(target.card.name)
        call = await state.texts.run(
            lambda: self.build(body, caller, target, state.limits), num_bytes=len(raw)
        )
        await serving.here(call, relayed)


def session_of(scope: Scope) -> str:
    """Return what the X-Session-ID header says; "" where there is none."""
    for name, value in scope["headers"]:
        if name == b"x-session-id":
            return str(value.decode("latin-1"))
    return ""
