"""Clients that leave, read slowly or come twice, and engines that die: over real sockets and processes.

The server takes its time for each step, so a test can act while a request runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from headrace.testing.live import (
    Numbers,
    RawClient,
    stream_events,
    until_idle,
    until_numbers,
)
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_SLOTS = 32
LONG: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "max_tokens": 4000}
STALL_SECONDS = 3
WORDS = [f" w{number:02}" for number in range(40)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    path = tmp_path_factory.mktemp("script") / "slow.json"
    write_script(path, WORDS, eos=False, step_delay_seconds=0.02)
    settings = {
        "gateway.stall_timeout": f"{STALL_SECONDS}s",
        "models.0.engine.max_num_sequences": NUM_SLOTS,
        "models.0.engine.max_batched_tokens": NUM_SLOTS,
        "models.0.engine.max_model_len": 8192,
        "models.0.engine.kv_memory": "64MiB",
    }
    arguments = ["--model", f"scripted:{path}"]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    with started_server(arguments) as server:
        yield server


@pytest.fixture
def url(server: StartedServer) -> Iterator[str]:
    """Where it listens. It is idle before and after, and still serves."""
    server.wait_ready()
    until_idle(server.url)
    yield server.url
    assert until_idle(server.url).lowest() >= 0
    assert words(server.url, 3) == " w00 w01 w02"


def words(url: str, count: int) -> str:
    body = {"prompt": "x", "max_tokens": count}
    answer = httpx.post(url + COMPLETIONS, json=body, timeout=60, verify=False)
    return str(answer.json()["choices"][0]["text"])


def leave_while_running(url: str, body: dict[str, Any]) -> None:
    before = Numbers(url).value("generation_tokens_total")
    client = RawClient(url).post(COMPLETIONS, body)
    until_numbers(url, lambda now: now.value("generation_tokens_total") >= before + 3)
    client.leave()


def leave_in_the_queue(url: str, body: dict[str, Any]) -> None:
    others = RawClient(url).post(COMPLETIONS, {**LONG, "n": NUM_SLOTS})
    until_numbers(url, lambda now: now.value("requests_running") == NUM_SLOTS)
    client = RawClient(url).post(COMPLETIONS, body)
    until_numbers(url, lambda now: now.value("requests_waiting") == 1)
    client.leave()
    until_numbers(
        url,
        lambda now: (
            (now.value("requests_waiting"), now.value("requests_running")) == (0, NUM_SLOTS)
        ),
    )
    others.leave()


def leave_in_the_prompt(url: str, body: dict[str, Any]) -> None:
    """Its prompt takes more than two hundred steps; not one token comes out of it."""
    before = Numbers(url).value("generation_tokens_total")
    prompt = os.urandom(3500).hex()
    client = RawClient(url).post(COMPLETIONS, {**body, "prompt": prompt, "max_tokens": 500})
    until_numbers(
        url,
        lambda now: (
            now.value("kv_blocks") - now.value("kv_blocks_free") >= 8
            and now.value("requests_running") == 1
        ),
    )
    client.leave()
    assert until_idle(url).value("generation_tokens_total") == before


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("leave", [leave_while_running, leave_in_the_queue, leave_in_the_prompt])
def test_a_client_that_leaves_is_aborted(url: str, leave: Any, streamed: bool) -> None:
    """S11(a-d): streamed or not, running, queued or in its prompt; each would take more than a minute."""
    before = Numbers(url).value("request_aborts_total")
    leave(url, {**LONG, "stream": streamed})
    left = 2 if leave is leave_in_the_queue else 1
    assert until_idle(url).value("request_aborts_total") == before + left


def test_a_stream_arrives_while_it_is_made(url: str) -> None:
    """S15: nothing compresses or collects it on the way."""
    before = Numbers(url).value("generation_tokens_total")
    body = {**LONG, "stream": True}
    headers = {"Accept-Encoding": "gzip, br, deflate"}
    options: dict[str, Any] = {"json": body, "headers": headers, "verify": False, "timeout": 60}
    with httpx.stream("POST", url + COMPLETIONS, **options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in response.headers
        first = next(response.iter_lines())
        assert json.loads(first[len("data: ") :])["choices"][0]["text"].startswith(" w00")
        now = Numbers(url)
        assert now.value("requests_running") == 1
        assert now.value("generation_tokens_total") < before + LONG["max_tokens"] / 2


def read_slowly(clients: list[RawClient], done: threading.Event) -> None:
    """10 B/s each, until done or cut off."""
    while clients and not done.wait(0.5):
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                client.socket.recv(5)


def test_slow_readers_hold_up_nobody(url: str) -> None:
    """S18: twenty that read 10 B/s beside a normal client; they are cut off and leave nothing."""
    aborts = Numbers(url).value("request_aborts_total")
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "ignore_eos": True, "max_tokens": 4000, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20}  # much to read
    done = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(RawClient(url, receive_buffer_bytes=2048)) for _ in range(20)]
        for client in slow:
            client.post(CHAT, body)
        reader = threading.Thread(target=read_slowly, args=(slow, done))
        stack.callback(reader.join)
        stack.callback(done.set)
        reader.start()
        until_numbers(url, lambda now: now.value("requests_running") == 20)
        num_normal = 0
        deadline = time.monotonic() + 60
        while Numbers(url).value("request_aborts_total") < aborts + 20:
            assert time.monotonic() < deadline, "the slow ones are still served"
            events = list(stream_events(url, COMPLETIONS, {"prompt": "x", "max_tokens": 20}))
            assert events[-1] == "[DONE]"
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            assert text == "".join(WORDS[:20])
            num_normal += 1
        assert num_normal > 0
        until_idle(url)
        done.set()
        assert not any(b"[DONE]" in client.read_to_end() for client in slow)


def test_the_same_client_id_at_once_and_after_an_abort(url: str) -> None:
    """P23: both are answered independently, whatever became of the first."""
    headers = {"X-Request-Id": "same"}
    first = stream_events(url, COMPLETIONS, {**LONG, "request_id": "same"}, headers)
    ids = {next(first)["id"]}
    second = list(stream_events(url, COMPLETIONS, {"prompt": "x", "max_tokens": 5}, headers))
    assert "".join(event["choices"][0]["text"] for event in second[:-1]) == "".join(WORDS[:5])
    assert Numbers(url).value("requests_running") == 1
    first.close()  # type: ignore[attr-defined]
    third = list(stream_events(url, COMPLETIONS, {"prompt": "x", "max_tokens": 5}, headers))
    assert third[-1] == "[DONE]" and len(third) > 1
    ids |= {second[0]["id"], third[0]["id"]}
    assert len(ids) == 3
    assert until_idle(url).lowest() >= 0


@pytest.mark.parametrize("streamed", [True, False])
def test_an_engine_that_is_killed_in_the_middle(
    server: StartedServer, url: str, streamed: bool
) -> None:
    """S12: one error event and the end; counted as a failure; the next engine serves."""
    before = Numbers(url)
    body = {**LONG, "stream": streamed}
    failures: list[httpx.Response] = []
    if streamed:
        events = stream_events(url, COMPLETIONS, body)
        said = [next(events) for _ in range(3)]
    else:
        options: dict[str, Any] = {"json": body, "timeout": 60, "verify": False}
        thread = threading.Thread(
            target=lambda: failures.append(httpx.post(url + COMPLETIONS, **options))
        )
        thread.start()
    until_numbers(url, lambda now: now.value("requests_running") == 1)
    (engine,) = psutil.Process(server.process.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    if streamed:
        said += events
        *chunks, last = said
        assert last["error"]["code"] == "engine_failed" and "SIGKILL" in last["error"]["message"]
        assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    else:
        thread.join()
        assert failures[0].status_code == 500
        assert failures[0].json()["error"]["code"] == "engine_failed"
    ready = httpx.get(f"{url}/ready", verify=False)
    assert ready.status_code == 503 and int(ready.headers["retry-after"]) >= 1
    server.wait_ready()
    after = until_idle(url)
    for name, count in (("request_failures_total", 1), ("engine_restarts_total", 1)):
        assert after.value(name) == before.value(name) + count, name
    reasons = [after.value("choices_total", finish_reason=reason) for reason in ("stop", "abort")]
    assert reasons == [
        before.value("choices_total", finish_reason=reason) for reason in ("stop", "abort")
    ]


def test_one_connection_carries_answers_of_every_kind(url: str) -> None:
    """S19: stream, JSON, refusal, stream on one kept-alive socket; no stray byte between or behind."""
    import http.client

    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.connect()
    opened = connection.sock
    for fields in ({"stream": True}, {}, {"temperature": -1}, {"stream": True}):
        body = {"prompt": "x", "max_tokens": 3, **fields}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        response = connection.getresponse()
        raw = response.read()
        if "temperature" in fields:
            assert response.status == 400
            assert json.loads(raw)["error"]["param"] == "temperature"
        elif fields:
            assert raw.startswith(b"data: {") and raw.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(raw)["choices"][0]["text"] == " w00 w01 w02"
        assert connection.sock is opened
    opened.settimeout(0.2)
    with pytest.raises(TimeoutError):
        opened.recv(1)
    connection.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_prompt_that_is_too_long_is_a_true_400(url: str, streamed: bool) -> None:
    """S13: JSON with the status, never a stream that fails."""
    body = {"prompt": "x" * 9000, "stream": streamed}
    answer = httpx.post(url + COMPLETIONS, json=body, verify=False)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "context_length_exceeded"
