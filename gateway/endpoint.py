"""The path of one generation request, the same for chat and completions.

Headers go out only once every prompt was accepted by an engine, so a refusal is still a true status;
from then on a failure is an event. Whatever ends the request, leaving the exit stack aborts what still
runs, the ticket is released and the facts are told, each exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from headrace.errors import RequestAborted, RequestError
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.admission import Ticket
from headrace.gateway.answer import Answer
from headrace.gateway.call import Call, Caller, TargetModel
from headrace.gateway.delivery import StreamDelivery, WholeDelivery
from headrace.gateway.dispatch import find_target, run_requests
from headrace.gateway.entrance import admission_view, pass_gate
from headrace.gateway.errors import JSONBytes, error_info, error_object, error_response
from headrace.gateway.identity import identity_of
from headrace.gateway.json_body import content_length, decode_body, read_body
from headrace.gateway.middleware import request_ids
from headrace.gateway.openai_schema import GenerationBody
from headrace.gateway.readiness import check_any_ready
from headrace.gateway.sse import DONE, SseWriter
from headrace.gateway.state import GatewayState, Limits
from headrace.gateway.tasks import first_error, until_disconnected
from headrace.types import TicketView

_logger = structlog.get_logger("headrace.gateway")
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
        )
        started = False

        async def tracked_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        with state.admission.take() as ticket:
            try:
                await self._serve(record, ticket, scope, receive, tracked_send)
            except Exception as error:
                _note_failure(record, error)
                if not started and not isinstance(error, RequestAborted):
                    await error_response(error)(scope, receive, send)
            except BaseException:
                record.status, record.error_code = 499, RequestAborted.code
                raise
            finally:
                record.finish()

    async def _serve(
        self, record: RequestRecord, ticket: Ticket, scope: Scope, receive: Receive, send: Send
    ) -> None:
        state = self.state
        check_any_ready(state)
        arrival = TicketView(
            stage="arrival",
            tenant=identity_of(scope).tenant,
            num_body_bytes=content_length(scope),
        )
        await pass_gate(state, ticket, arrival)
        raw = await read_body(scope, receive, state.config.gateway.max_body_bytes)
        caller = Caller(record.request_id, record.started_at, identity_of(scope))
        await until_disconnected(receive, lambda: self._answer(record, ticket, caller, raw, send))

    async def _answer(
        self, record: RequestRecord, ticket: Ticket, caller: Caller, raw: bytes, send: Send
    ) -> None:
        state = self.state
        body = decode_body(raw, self.decoder)
        target = await find_target(state, body.model)
        caller.identity.check_model(target.card.name)
        call = await state.texts.run(
            lambda: self.build(body, caller, target, state.limits), num_bytes=len(raw)
        )
        await pass_gate(state, ticket, admission_view(call, len(raw)))
        lengths = [len(request.prompt_token_ids) for request in call.requests]
        record.begin(call.card.name, lengths, call.num_choices)
        answer = Answer(
            call.format,
            record,
            num_choices=call.num_choices,
            envelope={
                "id": call.format.id_prefix + record.request_id,
                "object": "",
                "created": int(state.wall_clock()),
                "model": call.card.name,
                "system_fingerprint": f"fp_{call.card.revision[:12]}",
            },
            include_usage=call.include_usage,
        )
        if call.stream:
            await self._stream(record, answer, call, send)
        else:
            await self._whole(record, answer, call, send)

    async def _whole(self, record: RequestRecord, answer: Answer, call: Call, send: Send) -> None:
        await run_requests(self.state, call.requests, WholeDelivery(record, answer))
        await JSONBytes(answer.whole())({"type": "http"}, _no_receive, send)

    async def _stream(self, record: RequestRecord, answer: Answer, call: Call, send: Send) -> None:
        config = self.state.config.gateway
        writer = SseWriter(
            send,
            keepalive_interval=config.keepalive_interval,
            stall_timeout=config.stall_timeout,
        )
        try:
            async with anyio.create_task_group() as group:
                delivery = StreamDelivery(record, answer, writer, group)
                await run_requests(self.state, call.requests, delivery)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            is_reportable = isinstance(error, Exception) and not isinstance(error, RequestAborted)
            if not (writer.started and is_reportable):
                raise error from None
            assert isinstance(error, Exception)
            _note_failure(record, error)
            await writer.end([msgspec.json.encode(error_object(error_info(error)))])
            return
        await writer.end([*answer.last_chunks(), DONE])


def _note_failure(record: RequestRecord, error: Exception) -> None:
    info = error_info(error)
    record.status, record.error_code = info.http_status, info.code
    if not isinstance(error, RequestError):
        _logger.error("request failed", request_id=record.request_id, exc_info=error)


async def _no_receive() -> Any:
    raise AssertionError("the body was read already")
