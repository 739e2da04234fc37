"""One HTTP request over a connection of its own, as lightly as Python can: what the client takes of the cores
and of the time to the first token is taken from the server that it measures.

Headers and chunks are httptools' work. A connection a request, since some servers end kept-alive ones while the
next request is on its way.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import httptools

IDLE_SECONDS = 600.0
"""A server that says nothing for so long has failed the request."""
_MOST_BYTES = 1 << 16


class ExchangeFailed(Exception):
    """No whole answer came; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and their head but for its last line."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> Target:
        """ValueError where `url` is not one of http or https with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"'{url}' is no URL of http or https with a host; write http://HOST:PORT"
            )
        is_tls = parts.scheme == "https"
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        host = parts.netloc.rpartition("@")[2]
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if parts.username is not None and "Authorization" not in headers:
            given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append(f"Authorization: Basic {b64encode(given.encode()).decode()}")
        tls = ssl.create_default_context() if is_tls else None
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, tls, "".join(f"{line}\r\n" for line in lines).encode())


class _Answer:
    """What httptools calls as an answer comes. What follows the first whole one counts for nothing."""

    def __init__(self, take: Callable[[int, bytes], None]) -> None:
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._is_counted = False
        """Whether the head says where the body ends."""
        self.status = 0
        """Once the head is there: of the answer itself, not of hints that go before it."""
        self.is_whole = False

    def feed(self, data: bytes) -> None:
        """ExchangeFailed where this is no HTTP, and what `take` raises."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserUpgrade:
            raise ExchangeFailed("the server answers by changing the protocol") from None
        except httptools.HttpParserError as error:
            if not self.is_whole:
                raise ExchangeFailed(f"the answer is no HTTP: {error}") from None

    def on_message_begin(self) -> None:
        self._is_counted = self._is_counted and self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_whole:
            is_chunked = name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
            self._is_counted |= is_chunked or name.lower() == b"content-length"

    def on_headers_complete(self) -> None:
        status = int(self._parser.get_status_code())
        if status >= 200 and not self.status:
            self.status = status

    def on_body(self, body: bytes) -> None:
        if not self.is_whole:
            self._take(self.status, body)

    def on_message_complete(self) -> None:
        self.is_whole = self.status > 0

    def may_end(self) -> bool:
        """Whether an answer may be over where its connection is."""
        return self.is_whole or (self.status > 0 and not self._is_counted)


async def post(target: Target, body: bytes, take: Callable[[int, bytes], None]) -> int:
    """Send a request and return its status; `take(status, bytes)` gets the body as it comes.

    ExchangeFailed, OSError or TimeoutError where no whole answer comes, and what `take` raises.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_SECONDS) as patience:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
        try:
            writer.write(target.head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = _Answer(take)
            while not answer.is_whole:
                data = await reader.read(_MOST_BYTES)
                if not data:
                    break
                patience.reschedule(loop.time() + IDLE_SECONDS)
                answer.feed(data)
        finally:
            writer.close()
    if not answer.may_end():
        raise ExchangeFailed("the connection ended before the answer did")
    return answer.status
