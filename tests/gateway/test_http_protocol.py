"""What happens on a socket around the application: heads without end, no HTTP, upgrades, and clients that
are slow to send or to read.
"""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Iterator

import pytest
from gateway_server import Served

from headrace.config import GatewayConfig
from headrace.gateway.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, HttpProtocol
from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway

BODY = b'{"prompt": "hi"}'
PIECE = 8 << 10
STALL_SECONDS = 1.0
RECEIVE_SECONDS = 0.4
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


# --- slow to send -----------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    http = functools.partial(
        HttpProtocol, stall_timeout=STALL_SECONDS, receive_timeout=RECEIVE_SECONDS
    )
    served = Served(ws="none", http=http)
    yield served
    served.gateway.assert_idle()
    served.close()


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"G", "head"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", "head"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n{", "body"),
        (completion(b""), "body"),
    ],
)
def test_a_request_that_stays_half_sent_is_refused(
    impatient: Served, sent: bytes, part: str
) -> None:
    head, _, body = talk(impatient.port, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert f"the request's {part} was not complete" in error["message"]


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(impatient: Served) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as connection:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for byte in b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000:
                connection.sendall(bytes([byte]))
                time.sleep(RECEIVE_SECONDS / 20)


def test_a_connection_on_which_nothing_comes_is_closed(impatient: Served) -> None:
    assert talk(impatient.port) == b""


def test_a_second_request_that_stays_half_sent_is_refused(impatient: Served) -> None:
    answer = talk(impatient.port, completion(b"", closes=False), BODY, b"GET /hea")
    assert answer.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 200 " in answer and b"HTTP/1.1 408 " in answer


def test_a_body_that_is_slow_but_keeps_coming_is_served(impatient: Served) -> None:
    body = b'{"prompt": "' + b" " * 30_000 + b'", "max_tokens": 1}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as connection:
        connection.sendall(head % len(body))
        for start in range(0, len(body), 3000):
            connection.sendall(body[start : start + 3000])
            time.sleep(3 * RECEIVE_SECONDS / 11)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_waits_for_its_answer_is_not_late(impatient: Served) -> None:
    engine = impatient.gateway.engine
    engine.step_seconds = RECEIVE_SECONDS
    try:
        assert talk(impatient.port, completion(b""), BODY).startswith(b"HTTP/1.1 200 ")
    finally:
        engine.step_seconds = 0.0


def test_too_many_headers_are_refused(port: int) -> None:
    head, _, body = talk(port, completion(b"X: a\r\n" * MAX_HEADERS), BODY).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert f"at most {MAX_HEADERS}" in json.loads(body)["error"]["message"]
    assert talk(port, completion(b"X: a\r\n" * (MAX_HEADERS - 5)), BODY).startswith(
        b"HTTP/1.1 200 "
    )


# --- slow to read -----------------------------------------------------------------


def test_a_stream_cut_off_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """S18: the request's own line says why; the HTTP server has nothing to add."""
    card = fake_card(max_model_len=32_000, num_blocks=4_000)
    gateway = FakeGateway(FakeClient(card=card), config=GatewayConfig(stall_timeout=0.3))
    gateway.engine.script = lambda request, choice: gateway.engine.tokens_of("word " * 20_000)
    http = functools.partial(HttpProtocol, stall_timeout=STALL_SECONDS)
    served = Served(gateway=gateway, send_bytes=4096, ws="none", http=http)
    body = b'{"prompt": "hi", "stream": true, "logprobs": 5, "max_tokens": 20000}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(head + body)
        deadline = time.monotonic() + 20
        while not (gateway.metrics.finished and not served.num_connections):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    served.close()
    gateway.assert_idle()
    assert gateway.metrics.finished[0].status == 499
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len([line for line in lines if "client_stalled" in line]) == 1
    assert [record.getMessage() for record in caplog.records] == []
