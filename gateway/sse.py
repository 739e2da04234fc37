"""Writes one answer as server-sent events: one writer at a time, and never for ever.

A write that a client does not take holds up only its own request: the engine merges what comes
meanwhile, and after the stall timeout the client is cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import anyio
from starlette.types import Message, Send

from headrace.errors import RequestAborted

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
DONE = b"[DONE]"


class SseWriter:
    """The body of one streamed response. `watch` must run beside it from `start` on."""

    def __init__(self, send: Send, *, keepalive_interval: float, stall_timeout: float) -> None:
        self._send = send
        self._keepalive_interval = keepalive_interval
        self._stall_timeout = stall_timeout
        self._lock = asyncio.Lock()
        self._last_write = 0.0
        self._writing_since: float | None = None
        self.started = False

    async def start(self) -> None:
        """Send status 200 and the headers. From here on an error is an event."""
        self.started = True
        self._last_write = time.monotonic()
        await self._write({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def send(self, payloads: Iterable[bytes]) -> None:
        """Send one event per payload, in one write."""
        body = event_bytes(payloads)
        if body:
            await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def relay(self, events: bytes) -> None:
        """Send events as they are."""
        await self._write({"type": "http.response.body", "body": events, "more_body": True})

    async def end_with(self, events: bytes) -> None:
        """Send the last events as they are and close the body; needs no watch."""
        await self._write_in_time(
            {"type": "http.response.body", "body": events, "more_body": False}
        )

    async def end(self, payloads: Iterable[bytes]) -> None:
        """Send the last events and close the body; needs no watch."""
        await self.end_with(event_bytes(payloads))

    async def watch(self) -> None:
        """Send a comment whenever nothing was sent for an interval; raise ClientStalled where a write
        is not taken in time. Runs until cancelled.
        """
        while True:
            now = time.monotonic()
            if self._writing_since is not None:
                wait = self._writing_since + self._stall_timeout - now
                if wait <= 0:
                    raise self._stalled()
            else:
                wait = self._last_write + self._keepalive_interval - now
                if wait <= 0:
                    await self._write_in_time(_COMMENT)
                    continue
            await anyio.sleep(min(wait, self._stall_timeout))

    async def _write(self, message: Message) -> None:
        async with self._lock:
            self._writing_since = time.monotonic()
            await self._send(message)
            self._writing_since = None
            self._last_write = time.monotonic()

    async def _write_in_time(self, message: Message) -> None:
        with anyio.move_on_after(self._stall_timeout) as scope:
            await self._write(message)
        if scope.cancelled_caught:
            raise self._stalled()

    def _stalled(self) -> ClientStalled:
        return ClientStalled(
            f"the client took nothing for {self._stall_timeout:g} s and was cut off"
        )


def event_bytes(payloads: Iterable[bytes]) -> bytes:
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


class ClientStalled(RequestAborted):
    """The client keeps the connection open and does not read."""

    code = "client_stalled"
