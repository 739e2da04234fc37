"""The HTTP layer around the endpoints: ids, unknown paths, broken endpoints, facts and logs."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from headrace.gateway.middleware import ErrorMiddleware, RequestIdMiddleware
from headrace.gateway.observers import Observers
from headrace.gateway.text_assets import TextAssets
from headrace.testing.clock import FakeClock
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange, until
from headrace.types import GenerationRequest, RequestSummary

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CANARY = "canary-7f3a"


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("with space", False),
        (None, False),
    ],
)
def test_request_ids(client: TestClient, given: str | None, echoed: bool) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    for path in ("/health", "/nope"):
        found = client.get(path, headers=headers).headers["x-request-id"]
        assert (found == given) if echoed else re.fullmatch("[0-9a-f]{32}", found)
    response = client.post(CHAT, json={"messages": USER}, headers=headers)
    if not echoed:
        assert response.json()["id"] == "chatcmpl-" + response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        (
            "POST",
            "/v1/completions/",
            404,
            "unknown_url",
        ),  # no redirect to what the Host header says
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_routing_errors_are_error_objects(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_an_endpoint_that_breaks_is_a_500_without_details(gateway: FakeGateway) -> None:
    def script(request: GenerationRequest, choice: int) -> list[int]:
        raise AssertionError("not reached")

    def broken() -> bytes:
        raise RuntimeError(f"secret {CANARY}")

    gateway.engine.script = script
    gateway.metrics.render = broken  # type: ignore[method-assign]
    with TestClient(gateway.app) as client:
        response = client.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert CANARY not in response.text


def test_a_bug_behind_a_request_is_a_500_and_is_counted(gateway: FakeGateway) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError(f"secret {CANARY}")

    gateway.router.choose = broken  # type: ignore[method-assign, assignment]
    with TestClient(gateway.app) as client:
        response = client.post(CHAT, json={"messages": USER, "stream": True})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert CANARY not in response.text
    assert gateway.metrics.finished[0].status == 500
    gateway.assert_idle()


def test_middleware_leaves_other_scopes_alone() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def nothing(*arguments: object) -> Any:
        raise AssertionError

    wrapped = RequestIdMiddleware(ErrorMiddleware(app))
    asyncio.run(wrapped({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]


class TestFacts:
    """Each request is told exactly once, with times from the clock and no text."""

    def test_one_line_and_no_text(self, gateway: FakeGateway) -> None:
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": CANARY}]},
            {"messages": [{"role": "user", "content": CANARY}], "stream": True, "n": 2},
            {"messages": [{"role": CANARY, "content": CANARY}]},
            {"messages": [{"role": "user", "content": CANARY}], "temperature": -1},
        ]
        gateway.engine.script = lambda request, choice: gateway.engine.tokens_of(CANARY)
        with structlog.testing.capture_logs() as logs, TestClient(gateway.app) as client:
            for body in bodies:
                client.post(CHAT, json=body)
            page = client.get("/metrics").text
        finished = [entry for entry in logs if entry["event"] == "request finished"]
        assert [entry["status"] for entry in finished] == [200, 200, 400, 400]
        assert CANARY not in json.dumps(logs) and CANARY not in page
        assert finished[1]["reasons"] == ["stop", "stop"]
        assert finished[1]["completion_tokens"] > 2
        assert len({entry["request_id"] for entry in finished}) == 4
        gateway.state.observers.close()
        assert gateway.observed == gateway.metrics.finished
        assert len(gateway.observed) == 4

    def test_one_sample_of_the_first_token_per_request(
        self, client: TestClient, gateway: FakeGateway
    ) -> None:
        for n in (1, 2, 3):
            client.post(CHAT, json={"messages": USER, "n": n})
        client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3})
        client.post(CHAT, json={"messages": []})
        page = client.get("/metrics").text
        assert 'headrace_time_to_first_token_seconds_count{model="tiny"} 4.0' in page
        assert len(gateway.metrics.finished) == 5

    def test_times(self) -> None:
        async def main() -> None:
            clock = FakeClock(100.0)
            gateway = FakeGateway(clock=clock)
            engine = gateway.engine
            engine.script = lambda request, choice: list(b"abc") + engine.tokens_of("")
            engine.may_step.clear()
            body = {"messages": USER, "stream": True, "n": 2}
            exchange = RawExchange(gateway.app, CHAT, body).start()
            await until(lambda: engine.requests)
            clock.advance(2.0)
            engine.may_step.set()
            await exchange.until_sent(2)
            engine.may_step.clear()
            clock.advance(3.0)
            engine.may_step.set()
            await exchange.finished()
            summary = gateway.metrics.finished[0]
            assert summary.ttft_seconds == 2.0
            assert summary.tpot_seconds == pytest.approx(1.0)
            assert summary.duration_seconds == 5.0

        asyncio.run(main())


class TestObservers:
    SUMMARY = RequestSummary(
        request_id="r",
        model="m",
        endpoint=CHAT,
        status=200,
        finish_reasons=("stop",),
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        ttft_seconds=0.1,
        tpot_seconds=None,
        duration_seconds=0.2,
    )

    def test_a_slow_one_holds_up_nobody(self) -> None:
        release = threading.Event()
        threads: list[str] = []

        def slow(*, summary: RequestSummary) -> None:
            release.wait(10)
            threads.append(threading.current_thread().name)

        observers = Observers([slow], max_pending=2)
        for _ in range(5):
            observers.request_finished(self.SUMMARY)
        assert observers.num_dropped == 3
        release.set()
        observers.close(timeout_seconds=10)
        assert len(threads) == 2
        assert threading.main_thread().name not in threads

    def test_one_that_raises_is_logged_and_asked_again(self) -> None:
        calls: list[str] = []

        def broken(*, summary: RequestSummary) -> None:
            calls.append(summary.request_id)
            raise ValueError("no")

        observers = Observers([broken])
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                observers.request_finished(self.SUMMARY)
            observers.close(timeout_seconds=10)
        assert calls == ["r", "r"]
        assert [entry["event"] for entry in logs] == ["observer failed"] * 2

    def test_one_that_never_returns_keeps_nobody_from_leaving(self) -> None:
        release = threading.Event()
        before = set(threading.enumerate())
        observers = Observers([lambda *, summary: release.wait(60)])
        observers.request_finished(self.SUMMARY)
        with structlog.testing.capture_logs() as logs:
            observers.close(timeout_seconds=0.01)
        assert [entry.get("untold") for entry in logs] == [1]
        (blocked,) = set(threading.enumerate()) - before
        assert blocked.name == "headrace-observers" and blocked.daemon
        release.set()
        blocked.join(10)
        assert not blocked.is_alive()

    def test_one_that_exits_ends_only_its_own_call(self) -> None:
        calls: list[str] = []

        def exits(*, summary: RequestSummary) -> None:
            calls.append(summary.request_id)
            raise SystemExit(3)

        observers = Observers([exits])
        with structlog.testing.capture_logs():
            for _ in range(2):
                observers.request_finished(self.SUMMARY)
            observers.close(timeout_seconds=10)
        assert calls == ["r", "r"]


def test_liveness_beside_heavy_text_work() -> None:
    """While long prompts are tokenized, the event loop turns: it is never held for one of them."""

    async def main() -> None:
        gateway = FakeGateway()
        rng = random.Random(1)
        words = ["river", "stone", "the", "capital", "of", "France", "is", "\u4f60\u597d"]
        text = " ".join(rng.choice(words) for _ in range(120_000))
        warm = RawExchange(gateway.app, "/tokenize", {"prompt": "a"}).start()
        await warm.finished()
        start = time.perf_counter()
        long = RawExchange(gateway.app, "/tokenize", {"prompt": text}).start()
        turns = 0
        while long.task is not None and not long.task.done():
            await RawExchange(gateway.app, "/health", method="GET").start().finished()
            await asyncio.sleep(0.002)
            turns += 1
        seconds = time.perf_counter() - start
        assert long.json()["count"] > 120_000
        assert turns > 5, f"the loop turned {turns} times in {seconds:.2f} s"

    asyncio.run(main())


def test_long_texts_make_no_short_one_wait() -> None:
    async def main() -> None:
        texts = TextAssets(long_bytes=10)
        release = threading.Event()
        long = [
            asyncio.ensure_future(texts.run(lambda: release.wait(10), num_bytes=11))
            for _ in range(8)
        ]
        assert await texts.run(lambda: "done", num_bytes=10) == "done"
        assert not any(task.done() for task in long)
        release.set()
        await asyncio.gather(*long)

    asyncio.run(main())


def test_a_prompt_that_cannot_fit_is_refused_with_its_count(
    engine: FakeClient, client: TestClient
) -> None:
    response = client.post("/v1/completions", json={"prompt": "word " * 100_000})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "deflate"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_compressed_body_is_refused(client: TestClient, path: str, encoding: str) -> None:
    response = client.post(path, content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert response.status_code == 415
    assert encoding in response.json()["error"]["message"]


def test_identity_is_no_compression(client: TestClient) -> None:
    headers = {"content-encoding": "identity"}
    body = {"prompt": "a", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
