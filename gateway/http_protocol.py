"""uvicorn's HTTP/1.1, with bounds on what a client may send or leave, error objects, and no upgrades.

The parser collects a head for as long as it comes, and drops the body of a request that offers another
protocol, as Java's client does with every first one (`Upgrade: h2c`). Such an offer may be ignored (RFC
9110, 7.8), so that request is parsed a second time without it. And closing a connection waits for the
client to take what was written, however long that is.
"""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import ErrorInfo
from headrace.gateway.errors import error_object

MAX_HEAD_BYTES = 256 << 10
"""Of request line and headers. What is read at once with their beginning or their end is not counted."""

_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}
_OFFERS = (b"connection", b"upgrade", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is cut off where the client takes nothing of an answer for `stall_timeout`."""

    def __init__(self, *arguments: Any, stall_timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stall_timeout = stall_timeout
        self._stall_timer: TimerHandle | None = None
        self._num_resumes = 0
        self._num_heads = 0
        self._is_head_open = False
        self._head_bytes = 0

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

    def on_headers_complete(self) -> None:
        self._is_head_open = False
        super().on_headers_complete()

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
