"""One call handed to another server: its bytes there, the answer's bytes back, while they are still coming.

An answer in one piece is kept until it is whole, so that it may begin anew on another replica. Of a stream
nothing is kept: it may begin anew until its first event has gone out, and ends with one error event after that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from headrace.errors import ErrorInfo, RemoteError
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.delivery import Outlet
from headrace.gateway.ledger import Hold
from headrace.gateway.middleware import request_ids
from headrace.gateway.relay_body import RelayedBody
from headrace.gateway.relay_events import (
    RelayedEvents,
    RelayedUsage,
    error_of,
    renamed,
    usage_of,
)
from headrace.gateway.replica import Replica
from headrace.gateway.text_prefix import estimated_tokens
from headrace.gateway.trace_context import trace_of
from headrace.gateway.upstream_errors import UpstreamFailed

if TYPE_CHECKING:
    from headrace.gateway.upstream import Exchange, Upstream

MAX_ANSWER_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 20
_OUR_FAULT = (401, 403)
"""The other server does not take the key that the configuration gives it."""


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: Any = None


class _Answer(msgspec.Struct, frozen=True):
    usage: Any = None
    choices: list[_Choice] | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: Any = None
    message: Any = None


_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ANSWER = msgspec.json.Decoder(_Answer)
_REFUSAL = msgspec.json.Decoder(_Refusal)


@dataclass(slots=True)
class Relay:
    """One call on its way through."""

    record: RequestRecord
    body: RelayedBody
    headers: Mapping[str, str]
    outlet: Outlet
    cache_salt: str = ""
    """What keeps the caller's tenant apart in the other server's prefix cache."""
    last: bytes = b""
    """The end of a stream's body, still to be sent."""

    def may_restart(self) -> bool:
        """Whether nothing of an answer has gone out."""
        return not self.outlet.has_said

    async def run(self, replica: Replica, hold: Hold) -> None:
        """Have the call answered by one replica."""
        upstream = replica.upstream
        assert upstream is not None
        salt = self.cache_salt if upstream.entry.send_cache_salt else ""
        content = self.body.bytes_for(upstream.upstream_model, salt)
        exchange = upstream.begin()
        try:
            await exchange.send(upstream.request(self.record.endpoint, content, self.headers))
            if exchange.status >= 400:
                await self._refused(upstream, exchange)
            elif exchange.content_type.startswith("text/event-stream"):
                await self._stream(upstream, exchange, hold)
            else:
                await self._whole(upstream, exchange)
        finally:
            await exchange.close()

    async def _refused(self, upstream: Upstream, exchange: Exchange) -> None:
        """Hand on what the caller can do something about; raise the rest."""
        content = await exchange.read_all(_MAX_ERROR_BYTES)
        status = exchange.status
        if status in _OUR_FAULT:
            raise UpstreamRefusedKey(
                f"replica '{upstream.id}' refuses the key that api_key_env gives it"
            )
        writer = self.outlet.writer
        if status >= 500 or (writer is not None and writer.started):
            raise RemoteError(_error_in(content, exchange))
        self.record.status, self.record.error_code = status, "upstream_refused"
        self.record.relayed(RelayedUsage(), [])
        seconds = _header_value(exchange.headers.get("retry-after", ""))
        kept = [(b"retry-after", seconds)] if seconds else []
        await self._send_whole(status, content, exchange.content_type, kept)

    async def _whole(self, upstream: Upstream, exchange: Exchange) -> None:
        writer = self.outlet.writer
        if writer is not None and writer.started:
            raise UpstreamFailed(f"replica '{upstream.id}' does not stream what began as a stream")
        content = await exchange.read_all(MAX_ANSWER_BYTES)
        try:
            answer = _ANSWER.decode(content)
        except msgspec.MsgspecError as error:
            raise UpstreamFailed(f"replica '{upstream.id}' answered no JSON object") from error
        reasons = [choice.finish_reason for choice in answer.choices or ()]
        self.record.relayed(
            usage_of(answer.usage),
            [reason for reason in reasons if isinstance(reason, str)],
            otherwise=estimated_tokens(content),
        )
        if upstream.upstream_model != self.record.model:
            content = renamed(content, *self._names(upstream))
        await self._send_whole(exchange.status, content, exchange.content_type)

    async def _stream(self, upstream: Upstream, exchange: Exchange, hold: Hold) -> None:
        if self.outlet.writer is None:
            raise UpstreamFailed(f"replica '{upstream.id}' streams what was asked for in one piece")
        await self.outlet.begin()
        is_ours = upstream.upstream_model == self.record.model
        events = RelayedEvents(
            drop_usage=not self.body.wants_usage,
            rename=None if is_ours else self._names(upstream),
        )
        try:
            while not events.is_done and (piece := await exchange.read()) is not None:
                await self._pass_on(events, events.feed(piece), hold)
            await self._pass_on(events, events.finish(), hold)
        finally:
            self.record.relayed(
                events.usage,
                events.finish_reasons,
                otherwise=self.outlet.has_said * events.num_events,
            )
        if events.is_done:
            await exchange.finish()
        elif events.error is None:
            raise UpstreamFailed(f"replica '{upstream.id}' broke off")

    async def _pass_on(self, events: RelayedEvents, whole: bytes, hold: Hold) -> None:
        outlet, record = self.outlet, self.record
        if events.error is not None and not outlet.has_said:
            raise RemoteError(events.error)
        if not whole:
            return
        hold.prefilled()
        if not outlet.has_said:
            outlet.has_said = True
            record.first_token_at = record.state.clock.now()
        if events.error is not None:  # told by the event itself
            record.status, record.error_code = 502, events.error.code
        if events.is_done:
            self.last += whole
        else:
            assert outlet.writer is not None
            await outlet.writer.relay(whole)

    def _names(self, upstream: Upstream) -> tuple[bytes, bytes]:
        return (
            msgspec.json.encode(upstream.upstream_model),
            msgspec.json.encode(self.record.model),
        )

    async def _send_whole(
        self,
        status: int,
        content: bytes,
        content_type: str,
        more_headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.outlet.has_said = True
        send = self.outlet.send
        headers = [
            (b"content-type", _header_value(content_type) or b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *(more_headers or ()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class UpstreamRefusedKey(UpstreamFailed):
    """The other server does not know the gateway."""

    code = "upstream_refused_key"


def relayed_headers(scope: Scope) -> dict[str, str]:
    """Return what a relay passes on of a request's head: who it is and the trace it belongs to."""
    headers = {"x-request-id": request_ids(scope).echoed.decode("ascii")}
    trace = trace_of(scope)
    if trace is not None:
        headers["traceparent"] = trace.traceparent
        if trace.state:
            headers["tracestate"] = trace.state
    return headers


def _error_in(content: bytes, exchange: Exchange) -> ErrorInfo:
    """Return the error of another server's answer."""
    try:
        refusal = _REFUSAL.decode(content)
    except msgspec.MsgspecError:
        refusal = _Refusal()
    error = refusal.error or refusal.message or f"the server behind answered {exchange.status}"
    seconds = exchange.headers.get("retry-after", "")
    status = exchange.status if exchange.status < 600 else 502
    return error_of(error, status, float(seconds) if seconds.isdigit() else None)


def _header_value(text: str) -> bytes:
    """Return the bytes of another server's header; none where they could not stand in an answer of ours."""
    value = text.encode("utf-8", "surrogateescape")
    return b"" if _CONTROL.search(value) else value
