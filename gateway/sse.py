"""Writes one answer as server-sent events: one writer at a time, and never for ever.

A write that a client does not take holds up only its own request: the engine merges what comes
meanwhile, and after the stall timeout the client is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
from starlette.types import Send

from headrace.errors import RequestAborted

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"[DONE]"


class SseWriter:
    """The body of one streamed response."""

    def __init__(self, send: Send, *, keepalive_interval: float, stall_timeout: float) -> None:
        self._send = send
        self._keepalive_interval = keepalive_interval
        self._stall_timeout = stall_timeout
        self._lock = anyio.Lock()
        self._last_write = 0.0
        self.started = False

    async def start(self) -> None:
        """Send status 200 and the headers. From here on an error is an event."""
        self.started = True
        await self._write({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def send(self, payloads: Iterable[bytes]) -> None:
        """Send one event per payload, in one write."""
        body = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
        if body:
            await self._body(body)

    async def end(self) -> None:
        """Close the body."""
        await self._body(b"", more_body=False)

    async def keep_alive(self) -> None:
        """Send a comment line whenever nothing was sent for an interval. Runs until cancelled."""
        while True:
            wait = self._last_write + self._keepalive_interval - anyio.current_time()
            if wait > 0:
                await anyio.sleep(wait)
            else:
                await self._body(b": keep-alive\n\n")

    async def _body(self, body: bytes, *, more_body: bool = True) -> None:
        await self._write({"type": "http.response.body", "body": body, "more_body": more_body})

    async def _write(self, message: dict[str, object]) -> None:
        async with self._lock:
            with anyio.move_on_after(self._stall_timeout) as scope:
                await self._send(message)
            if scope.cancelled_caught:
                raise ClientStalled(
                    f"the client took nothing for {self._stall_timeout:g} s and was cut off"
                )
            self._last_write = anyio.current_time()


class ClientStalled(RequestAborted):
    """The client keeps the connection open and does not read."""

    code = "client_stalled"
