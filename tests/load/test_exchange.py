"""One request over a connection of its own: every way in which an answer may end, and what is no answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from headrace.load.exchange import ExchangeFailed, Target, post

HEAD = b"HTTP/1.1 200 OK\r\n"
Taken = list[tuple[int, bytes]]


def exchanged(
    *pieces: bytes, take: Callable[[int, bytes], None] | None = None
) -> tuple[int, Taken, bytes]:
    """Return the status, what was taken and the request: a server answers with these pieces and leaves."""
    taken: Taken = []
    asked = bytearray()
    left: asyncio.Event

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.readuntil(b"\r\n\r\n"))
        asked.extend(await reader.readexactly(4))
        with contextlib.suppress(ConnectionError):  # of a client that has left
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.close()
            await writer.wait_closed()
        left.set()

    async def main() -> int:
        nonlocal left
        left = asyncio.Event()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Target.of(f"http://127.0.0.1:{port}/v1/x?y=1", {"X-Key": "k"})
            try:
                return await post(target, b"body", take or (lambda *found: taken.append(found)))
            finally:
                await left.wait()

    return asyncio.run(main()), taken, bytes(asked)


def test_the_request_is_what_was_given() -> None:
    status, taken, asked = exchanged(HEAD + b"Content-Length: 2\r\n\r\nok")
    assert (status, taken) == (200, [(200, b"ok")])
    assert asked.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Key: k\r\n" in asked and asked.endswith(b"\r\nContent-Length: 4\r\n\r\nbody")


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"Content-Length: 4\r\n\r\n", b"ab", b"cd"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r", b"\nab\r\n2\r\ncd\r\n", b"0\r\n\r\n"),
        (HEAD + b"\r\nab", b"cd"),  # ends where the connection does
        (HEAD + b"Transfer-Encoding: identity\r\n\r\nab", b"cd"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", HEAD + b"Content-Length: 4\r\n\r\nabcd"),
        (b"HTTP/1.1 103 Hints\r\nContent-Length: 0\r\n\r\n", HEAD + b"\r\nabcd"),
        (HEAD + b"Content-Length: 4\r\n\r\nabcdHTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\nno",),
        (HEAD + b"Content-Length: 4\r\n\r\nabcd\0\1 what is no HTTP",),
    ],
    ids=[
        "counted",
        "chunked",
        "to the end",
        "identity",
        "behind hints",
        "behind counted hints",
        "two answers",
        "and rubbish",
    ],
)
def test_a_whole_answer(pieces: tuple[bytes, ...]) -> None:
    status, taken, _ = exchanged(*pieces)
    assert status == 200 and b"".join(body for _, body in taken) == b"abcd"


def test_a_refusal_without_a_body_has_its_status() -> None:
    status, taken, _ = exchanged(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
    assert (status, taken) == (503, [])


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((), "ended before"),
        ((b"HTTP/1.1 200 OK\r\n",), "ended before"),
        ((HEAD + b"Content-Length: 9\r\n\r\nabc",), "ended before"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",), "ended before"),
        ((b"SSH-2.0-nothing\r\n",), "no HTTP"),
        (
            (b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",),
            "changing the protocol",
        ),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",), "no HTTP"),
    ],
)
def test_a_broken_answer_fails(pieces: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(ExchangeFailed, match=reason):
        exchanged(*pieces)


def test_what_the_taker_raises_comes_out() -> None:
    def take(status: int, body: bytes) -> None:
        raise ValueError("not what was expected")

    with pytest.raises(ValueError, match="not what was expected"):
        exchanged(HEAD + b"Content-Length: 2\r\n\r\nok", take=take)


@pytest.mark.parametrize("url", ["ftp://host/x", "/v1/x", "http://", "host:80/x"])
def test_what_is_no_url_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Target.of(url, {})


def test_addresses() -> None:
    assert Target.of("http://[::1]:81/x", {}).host == "::1"
    secure = Target.of("https://example.org", {})
    assert (secure.port, secure.tls is not None) == (443, True)
    assert secure.head.startswith(b"POST / HTTP/1.1\r\nHost: example.org\r\n")
    known = Target.of("http://me:p%40ss@example.org/x", {})
    assert b"Host: example.org\r\n" in known.head
    assert b"Authorization: Basic bWU6cEBzcw==\r\n" in known.head
    given = Target.of("http://me:p@example.org/x", {"Authorization": "Bearer k"})
    assert given.head.count(b"Authorization") == 1
