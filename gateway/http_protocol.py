"""uvicorn's HTTP/1.1, with bounds on what a client may send or leave, error objects, and no upgrades.

The parser collects a head for as long as it comes, and drops the body of a request that offers another
protocol, as Java's client does with every first one (`Upgrade: h2c`). Such an offer may be ignored (RFC
9110, 7.8), so that request is parsed a second time without it. Closing a connection waits for the client to
take what was written, however long that is. And a request may stay half sent for ever.

A client that ends its side of the connection has left, even if it still reads: nothing tells the two
apart before something is written, and an answer that nobody reads would be computed to its end.
"""

from __future__ import annotations

import asyncio
import functools
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.errors import ErrorInfo
from headrace.gateway.corked import CorkedTransport
from headrace.gateway.errors import error_object
from headrace.gateway.middleware import HANG_UP
from headrace.gateway.surplus import Surplus
from headrace.gateway.tasks import WATCH_CLIENT

MAX_HEAD_BYTES = 256 << 10
"""Of request line and headers. What is read at once with their beginning or their end is not counted."""

MAX_HEADERS = 256
MIN_BODY_BYTES_PER_SECOND = 1024
"""What a body must bring beyond `receive_timeout`."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
_OFFERS = (b"connection", b"upgrade", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is cut off where the client takes nothing of an answer for `stall_timeout`, and
    where a head, or a body at 1 KB/s, is not in after `receive_timeout`; both in seconds. Beyond
    `max_connections` it is refused.
    """

    def __init__(
        self,
        *arguments: Any,
        stall_timeout: float,
        receive_timeout: float = 30.0,
        max_connections: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._max_connections = max_connections
        self._stall_timeout = stall_timeout
        self._receive_timeout = receive_timeout
        self._receive_timer: TimerHandle | None = None
        self._receive_start = 0.0
        self._body_bytes = 0
        self._stall_timer: TimerHandle | None = None
        self._num_resumes = 0
        self._num_heads = 0
        self._is_head_open = False
        self._head_bytes = 0
        self._on_leave: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport, self.loop))
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self.app = Surplus(self.app, self._max_connections)
        self._start_receiving()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        was_open, num_heads = self._is_head_open, self._num_heads
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "invalid_http", "the request is not valid HTTP/1.1")
        else:
            if was_open and self._is_head_open and num_heads == self._num_heads:
                self._count_head(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_heads += 1
        self._is_head_open = True
        self._head_bytes = 0
        self._start_receiving()

    def on_headers_complete(self) -> None:
        self._is_head_open = False
        if len(self.headers) > MAX_HEADERS:
            message = f"the request has {len(self.headers)} headers; at most {MAX_HEADERS} are read"
            self._refuse(431, "too_many_headers", message)
            raise ValueError(message)  # ends the parsing
        super().on_headers_complete()
        self.scope[HANG_UP] = functools.partial(self._hang_up, self.cycle)  # type: ignore[literal-required]
        self.scope[WATCH_CLIENT] = functools.partial(self._watch_client, self.cycle)  # type: ignore[literal-required]
        self._start_receiving()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_receiving()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_resumes += 1

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._stop_receiving()
        if self._on_leave is not None:
            self._on_leave()

    def _watch_client(
        self, cycle: RequestResponseCycle, leave: Callable[[], None]
    ) -> Callable[[], None]:
        """Have `leave` called once the connection ends; return what ends the watch.

        One request of a connection is served at a time, so there is one watch.
        """
        self._on_leave = leave
        self.flow.resume_reading()  # the end is read, too
        if cycle.disconnected:
            self.loop.call_soon(leave)
        return self._forget_client

    def _forget_client(self) -> None:
        self._on_leave = None

    def _start_receiving(self) -> None:
        """Something is expected from the client: the time it has for that begins."""
        self._stop_receiving()
        self._body_bytes = 0
        self._receive_start = self.loop.time()
        self._receive_timer = self.loop.call_later(self._receive_timeout, self._check_receiving)

    def _stop_receiving(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _check_receiving(self) -> None:
        """Hang up on a client that is late; while the server itself does not read, nobody is."""
        if self.flow.read_paused or self.pipeline or self._waits_for_continue():
            self._start_receiving()
            return
        allowed = self._receive_timeout + self._body_bytes / MIN_BODY_BYTES_PER_SECOND
        left = self._receive_start + allowed - self.loop.time()
        if left > 0:
            self._receive_timer = self.loop.call_later(left, self._check_receiving)
        elif self._num_heads and (self._is_head_open or not self.cycle.response_started):
            part = "head" if self._is_head_open else "body"
            self._refuse(
                408,
                "request_timeout",
                f"the request's {part} was not complete after {allowed:.0f} s; send it faster",
            )
        else:
            self.transport.close()

    def _waits_for_continue(self) -> bool:
        return self.cycle is not None and bool(self.cycle.waiting_for_100_continue)

    def _hang_up(self, cycle: RequestResponseCycle) -> None:
        """End the connection of an answer that cannot be completed; its reader sees that it is torn."""
        if not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True
            self.transport.abort()

    def _watch_writes(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(
            self._stall_timeout, self._check_writes, self._num_resumes, num_bytes
        )

    def _check_writes(self, num_resumes: int, num_bytes: int) -> None:
        """Hang up where nothing was taken since the watch began; else watch on until all is taken."""
        self._stall_timer = None
        num_left = self.transport.get_write_buffer_size()
        waits = self.flow.write_paused or self.transport.is_closing()
        if waits and num_resumes == self._num_resumes and num_left >= num_bytes > 0:
            self.transport.abort()
        elif num_left:
            self._watch_writes()

    def _should_upgrade(self) -> bool:
        """Whether the parser has skipped a body; uvicorn then leaves the request to `data_received`."""
        is_offered: bool = self.parser.should_upgrade()
        return is_offered and self.parser.get_method() != b"CONNECT"

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer; `rest` is what came behind its head."""
        version = self.parser.get_http_version().encode("ascii")
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in _OFFERS]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                431,
                "head_too_large",
                f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer",
            )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer for the application, which never saw the request, and hang up."""
        if self.transport.is_closing():
            return
        info = ErrorInfo(code=code, message=message, http_status=status)
        body = msgspec.json.encode(error_object(info))
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
