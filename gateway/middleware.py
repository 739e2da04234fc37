"""Pure ASGI middleware: ids and traces in and out, and no exception that reaches the server.

A client's X-Request-Id is only echoed and logged. The id that names a request inside is always our own,
because proxies retry with the same header while the first try still runs.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.gateway.errors import error_response
from headrace.gateway.trace_context import own_trace, received_trace, set_trace

_logger = structlog.get_logger("headrace.gateway")
HANG_UP = "headrace.hang_up"
"""Where the scope has what ends the connection at once; there is none without a real connection."""
_ECHOED = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Our own id, and the one the response carries."""

    internal: str
    echoed: bytes


def request_ids(scope: Scope) -> RequestIds:
    """Return the ids of a request that came through RequestIdMiddleware."""
    ids = scope["headrace.ids"]
    assert isinstance(ids, RequestIds)
    return ids


class RequestIdMiddleware:
    """Gives every request an id, binds it to the log context and sends it back as X-Request-Id.

    The same for the trace it belongs to, as `traceparent`. `sample_ratio` is the share of new traces to
    record; None where no spans are recorded.
    """

    def __init__(self, app: ASGIApp, sample_ratio: float | None = None) -> None:
        self.app = app
        self._sample_ratio = sample_ratio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        internal = secrets.token_hex(16)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        ids = RequestIds(internal, given if _ECHOED.fullmatch(given) else internal.encode())
        scope["headrace.ids"] = ids
        trace = received_trace(scope)
        if self._sample_ratio is not None:
            trace = own_trace(trace, self._sample_ratio)
        set_trace(scope, trace)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", ids.echoed)]
                if trace is not None:
                    headers.append((b"traceparent", trace.traceparent.encode()))
                message = {**message, "headers": headers}
            await send(message)

        bound = {"request_id": internal}
        if ids.echoed != internal.encode():
            bound["client_request_id"] = ids.echoed.decode("ascii")
        if trace is not None:
            bound["trace_id"] = trace.trace_id
        before = structlog.contextvars.bind_contextvars(**bound)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            structlog.contextvars.reset_contextvars(**before)


class ErrorMiddleware:
    """Turns whatever an endpoint raises into an error object; the last line against a torn response.

    An answer that ends before it is complete ends with its connection, and in silence: whoever gave it
    up has said why.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = complete = False

        async def tracked_send(message: Message) -> None:
            nonlocal started, complete
            started = True
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, tracked_send)
        except Exception as error:
            info_error = error_response(error)
            if info_error.status_code == 500:
                _logger.error("request failed", path=scope.get("path"), exc_info=error)
            if scope["type"] == "http" and not started:
                await info_error(scope, receive, send)
                return
            if not _hang_up(scope):
                raise
        else:
            if started and not complete:
                _hang_up(scope)


def _hang_up(scope: Scope) -> bool:
    """End the connection at once. False where there is none that could be ended."""
    end = scope.get(HANG_UP)
    if end is not None:
        end()
    return end is not None
