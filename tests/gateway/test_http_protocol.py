"""What arrives on a socket before the application sees a request: heads without end, no HTTP, upgrades."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Iterator

import pytest
from gateway_server import Served

from headrace.gateway.http_protocol import MAX_HEAD_BYTES, HttpProtocol

BODY = b'{"prompt": "hi"}'
PIECE = 8 << 10
STALL_SECONDS = 1.0
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    http = functools.partial(HttpProtocol, stall_timeout=STALL_SECONDS)
    served = Served(send_bytes=4096, ws="none", http=http)
    yield served
    served.close()


@pytest.fixture
def port(served: Served) -> int:
    return served.port


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


def ask_much(port: int) -> socket.socket:
    """Ask for an answer of some MB and return the connection, which has room for little of it."""
    body = json.dumps({"prompt": "x" * 500_000, "return_token_strs": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    return connection


def test_a_client_that_takes_nothing_is_cut_off(served: Served) -> None:
    """An answer in one piece too: its bytes and its connection would be kept as long as the client likes."""
    with ask_much(served.port) as connection:
        connection.recv(1)
        deadline = time.monotonic() + 20
        while served.num_connections and time.monotonic() < deadline:
            time.sleep(0.02)
        assert served.num_connections == 0


def test_a_client_that_takes_a_little_at_a_time_gets_all(served: Served) -> None:
    answer = b""
    with ask_much(served.port) as connection:
        for _ in range(int(2 * STALL_SECONDS / 0.2)):
            answer += connection.recv(1 << 16)
            time.sleep(0.2)
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["count"] == 500_000
