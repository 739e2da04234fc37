"""What arrives on a socket before the application sees a request: heads without end, no HTTP, upgrades."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from headrace.gateway.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from headrace.testing.fake_gateway import FakeGateway

BODY = b'{"prompt": "hi"}'
PIECE = 8 << 10
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    gateway = FakeGateway()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(gateway.app, log_config=None, lifespan="off", ws="none", http=HttpProtocol)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    listener.close()
    gateway.state.observers.close()


def talk(port: int, *pieces: bytes) -> bytes:
    """Send the pieces one by one; return all that comes back until the server hangs up."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(1 << 16):
                answer += data
        except (BrokenPipeError, ConnectionResetError):
            pass  # it hung up while we were still sending
    return answer


def completion(fields: bytes, *, closes: bool = True) -> bytes:
    close = b"Connection: close\r\n" if closes else b""
    length = b"Content-Length: %d\r\n" % len(BODY)
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + close + fields + length + b"\r\n"


@pytest.mark.parametrize("piece", [b"a" * PIECE, b"X: a\r\n" * (PIECE // 6)])
def test_a_head_that_never_ends_is_cut_off(port: int, piece: bytes) -> None:
    """One endless field, or endless fields: 16 MB of them are not taken."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: a")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(64 * MAX_HEAD_BYTES // PIECE):
                connection.sendall(piece)


def test_a_large_head_is_served(port: int) -> None:
    fields = b"X-Padding: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    assert talk(port, completion(fields), BODY).startswith(b"HTTP/1.1 200 ")


def test_large_heads_one_after_the_other_are_counted_each_by_itself(port: int) -> None:
    fields = b"X-Padding: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    head = completion(fields, closes=False)
    answer = talk(port, head, BODY, head, BODY, head, BODY, completion(b""), BODY)
    assert answer.count(b"HTTP/1.1 200 ") == 4


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / FTP/1\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_object(port: int, garbage: bytes) -> None:
    head, _, body = talk(port, garbage).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("num_first", [0, 5, len(BODY)])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_kept(
    port: int, num_first: int
) -> None:
    """Java's HttpClient offers h2c with its first request; the connection serves others after it."""
    head = completion(OFFER, closes=False)
    first, second = BODY[:num_first], BODY[num_first:]
    answer = talk(port, head[:40], head[40:] + first, second, completion(b""), BODY)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b'"text":"Hello world"') == 2


def test_an_offer_without_a_body(port: int) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    answer = talk(port, health + OFFER + b"\r\n", health + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2


def test_a_chunked_body_behind_an_offer(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + OFFER
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    answer = talk(port, head + b"\r\n" + chunks, completion(b""), BODY)
    assert answer.count(b"HTTP/1.1 200 ") == 2
