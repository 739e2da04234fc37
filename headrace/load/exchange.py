"""One HTTP request over a connection of its own, as lightly as Python can: what the client takes of the cores
and of the time to the first token is taken from the server that it measures.

Headers and chunks are httptools' work. A connection a request, since some servers end kept-alive ones while the
next request is on its way.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

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
        tls = ssl.create_default_context() if is_tls else None
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, tls, "".join(f"{line}\r\n" for line in lines).encode())


class _Answer:
    """What httptools calls as an answer comes."""

    def __init__(self, status_of: Callable[[], int], take: Callable[[int, bytes], None]) -> None:
        self._status_of = status_of
        self._take = take
        self._is_counted = False
        """Whether the head says where the body ends."""
        self.has_head = self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_counted |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.has_head = self._status_of() >= 200

    def on_body(self, body: bytes) -> None:
        self._take(self._status_of(), body)

    def on_message_complete(self) -> None:
        self.is_whole = self.has_head

    def may_end(self) -> bool:
        """Whether an answer may be over where its connection is."""
        return self.is_whole or (self.has_head and not self._is_counted)


async def post(target: Target, body: bytes, take: Callable[[int, bytes], None]) -> int:
    """Send a request and return its status; `take(status, bytes)` gets the body as it comes.

    ExchangeFailed, OSError or TimeoutError where no whole answer comes, and what `take` raises.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_SECONDS) as patience:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
        try:
            writer.write(target.head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = _Answer(lambda: int(parser.get_status_code()), take)
            parser = httptools.HttpResponseParser(answer)
            while not answer.is_whole:
                data = await reader.read(_MOST_BYTES)
                if not data:
                    break
                patience.reschedule(loop.time() + IDLE_SECONDS)
                parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise ExchangeFailed(f"the answer is no HTTP: {error}") from None
        finally:
            writer.close()
    if not answer.may_end():
        raise ExchangeFailed("the connection ended before the answer did")
    return int(parser.get_status_code())
