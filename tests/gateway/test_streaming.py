"""What a stream looks like to a strict client, and that it says what the answer in one piece says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.config.schema import GatewayConfig
from headrace.errors import Unavailable
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange, parse_events, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "hi"}}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def stream(client: TestClient, path: str, **fields: Any) -> list[Any]:
    """Return the checked events of a stream that went well, without the [DONE] at its end."""
    response = client.post(path, json={**BASE[path], **fields, "stream": True})
    assert response.status_code == 200, response.text
    events = parse_events(response.content)
    assert events.pop() == "[DONE]"
    check_chunks(events, path, fields)
    return events


def check_chunks(events: list[Any], path: str, fields: dict[str, Any]) -> None:
    options = fields.get("stream_options") or {}
    wants_usage = bool(options.get("include_usage"))
    chunks = events[:-1] if wants_usage else events
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events}) == 1
    name = "chat.completion.chunk" if path == CHAT else "text_completion"
    seen: set[int] = set()
    ended: set[int] = set()
    for chunk in chunks:
        assert chunk["object"] == name
        assert chunk["system_fingerprint"] == "fp_0123456789ab"
        assert ("usage" in chunk) == wants_usage and chunk.get("usage") is None
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in ended, "nothing follows the end of a choice"
        assert "finish_reason" in choice
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] in ("stop", "length")
            ended.add(index)
        if path == CHAT:
            delta = choice["delta"]
            assert ("role" in delta) == (index not in seen)
            assert delta.get("role", "assistant") == "assistant"
            assert isinstance(delta.get("content", ""), str)
            assert (delta == {}) == (index in ended)
        else:
            assert isinstance(choice["text"], str)
            assert (choice["text"] == "") == (index in ended)
        seen.add(index)
    assert seen == ended
    if wants_usage:
        assert events[-1]["choices"] == []
        assert set(events[-1]["usage"]) == {
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
            "prompt_tokens_details",
        }


def texts(events: list[Any]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in events:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


def whole_texts(answer: dict[str, Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    }


def reasons(events: list[Any]) -> dict[int, str]:
    choices = [choice for chunk in events for choice in chunk["choices"]]
    return {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"] is not None}


@PATHS
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello world", {}),
        ("ob \U0001fae0 ke \u4f60\u597d", {}),
        ("Hello world", {"max_tokens": 1}),
        ("Hello world", {"n": 3}),
        ("one TWO three", {"stop": ["TWO"]}),
        ("UNO DUE TRE", {"stop": ["TRE\nAAAA"]}),
        ("Is it?\n", {"stop": ["\n"]}),
        ("Hello world", {"stop": "o w", "n": 2, "seed": 7}),
    ],
)
def test_joined_deltas_equal_the_whole_text(
    client: TestClient, engine: FakeClient, path: str, text: str, fields: dict[str, Any]
) -> None:
    def script(request: Any, choice: int) -> list[int]:
        return engine.tokens_of(text + " and more" * choice)

    engine.script = script
    options = {"stream_options": {"include_usage": True}}
    events = stream(client, path, **fields, **options)
    answer = client.post(path, json={**BASE[path], **fields}).json()
    assert texts(events) == whole_texts(answer)
    assert "\ufffd" not in "".join(texts(events).values())
    assert reasons(events) == {c["index"]: c["finish_reason"] for c in answer["choices"]}
    assert events[-1]["usage"] == answer["usage"]
    assert sorted(texts(events)) == list(range(fields.get("n", 1)))


def test_an_empty_answer_still_has_its_role(client: TestClient, engine: FakeClient) -> None:
    engine.script = lambda request, choice: engine.tokens_of("")
    first, last = stream(client, CHAT)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    answer = client.post(CHAT, json=BASE[CHAT]).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1


def test_an_empty_completion(client: TestClient, engine: FakeClient) -> None:
    engine.script = lambda request, choice: engine.tokens_of("")
    (only,) = stream(client, COMPLETIONS)
    assert only["choices"][0]["finish_reason"] == "stop"


@PATHS
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"other": 1}])
def test_no_usage_unless_asked(client: TestClient, path: str, options: object) -> None:
    events = stream(client, path, stream_options=options, n=2)
    assert all(chunk["choices"] for chunk in events)


@PATHS
def test_usage_counts_a_prompt_once(client: TestClient, engine: FakeClient, path: str) -> None:
    engine.cached_tokens = 1
    answer = client.post(path, json={**BASE[path], "n": 3, "max_tokens": 2}).json()
    prompt = len(engine.requests[-1].prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_headers_of_a_stream(client: TestClient) -> None:
    body = {**BASE[CHAT], "stream": True}
    response = client.post(CHAT, json=body, headers={"accept-encoding": "gzip"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers


@PATHS
def test_a_refusal_is_a_true_status(client: TestClient, engine: FakeClient, path: str) -> None:
    engine.refusal = Unavailable("16 requests wait already", retry_after_seconds=2.5)
    for streamed in (False, True):
        response = client.post(path, json={**BASE[path], "stream": streamed})
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/json"
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["code"] == "unavailable"


class TestFailureMidStream:
    """One error event, then the end: no finish_reason, no [DONE] that a client could take for success."""

    def check(self, gateway: FakeGateway, body: bytes) -> None:
        *chunks, last = parse_events(body)
        assert last["error"]["code"] == "engine_failed"
        assert last["error"]["type"] == "server_error"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all(choice["finish_reason"] is None for choice in choices)
        summary = gateway.metrics.finished[-1]
        assert summary.status == 500
        assert summary.finish_reasons == ("error",)

    @PATHS
    def test_the_step_breaks(
        self, client: TestClient, gateway: FakeGateway, engine: FakeClient, path: str
    ) -> None:
        engine.script = lambda request, choice: list(b"abcdefgh")
        engine.fails_after = 3
        response = client.post(path, json={**BASE[path], "stream": True})
        assert response.status_code == 200
        self.check(gateway, response.content)
        assert texts(parse_events(response.content)[:-1]) == {0: "abc"}
        whole = client.post(path, json=BASE[path])
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_failed"

    def test_the_engine_dies(self) -> None:
        async def main() -> None:
            gateway = FakeGateway()
            engine = gateway.engine
            engine.script = lambda request, choice: list(b"abcdefgh")
            engine.step_seconds = 0.001
            exchange = RawExchange(gateway.app, CHAT, {**BASE[CHAT], "stream": True}).start()
            await exchange.until_sent(3)
            engine.die()
            await exchange.finished()
            assert exchange.is_complete
            self.check(gateway, exchange.body)
            gateway.assert_idle()

        asyncio.run(main())

    def test_a_failure_before_the_first_token_gives_no_times(
        self, client: TestClient, gateway: FakeGateway, engine: FakeClient
    ) -> None:
        engine.fails_after = 0
        client.post(CHAT, json={**BASE[CHAT], "stream": True})
        assert gateway.metrics.finished[-1].ttft_seconds is None
        page = client.get("/metrics").text
        assert "headrace_time_to_first_token_seconds_count" not in page
        failures = (
            'headrace_request_failures_total{endpoint="/v1/chat/completions",model="tiny"} 1.0'
        )
        assert failures in page


def test_one_failing_prompt_fails_the_call(client: TestClient, engine: FakeClient) -> None:
    def script(request: Any, choice: int) -> list[int]:
        if request.prompt_token_ids == [66]:
            engine.fails_after = 2
        return list(b"abcdefgh")

    engine.script = script
    response = client.post(COMPLETIONS, json={"prompt": [[65], [66]], "stream": True})
    assert parse_events(response.content)[-1]["error"]["code"] == "engine_failed"


def test_comments_keep_a_silent_stream_alive() -> None:
    async def main() -> None:
        gateway = FakeGateway(config=GatewayConfig(keepalive_interval=0.01))
        gateway.engine.may_step.clear()
        exchange = RawExchange(gateway.app, CHAT, {**BASE[CHAT], "stream": True}).start()
        await exchange.until_sent(4)
        assert exchange.status == 200
        assert exchange.body == b": keep-alive\n\n" * 3
        gateway.engine.may_step.set()
        await exchange.finished()
        events = parse_events(exchange.body)
        assert events[-1] == "[DONE]"
        assert texts(events[:-1]) == {0: "Hello world"}
        gateway.assert_idle()

    asyncio.run(main())


def test_headers_wait_for_the_engine() -> None:
    async def main() -> None:
        gateway = FakeGateway()
        engine = gateway.engine
        engine.may_accept.clear()
        exchange = RawExchange(gateway.app, CHAT, {**BASE[CHAT], "stream": True}).start()
        await until(lambda: engine.requests)
        assert exchange.sent == []
        engine.may_step.clear()
        engine.may_accept.set()
        await exchange.until_sent(1)
        assert exchange.status == 200 and exchange.body == b""
        engine.may_step.set()
        await exchange.finished()

    asyncio.run(main())


def test_news_are_merged_while_the_client_does_not_read() -> None:
    async def main() -> None:
        gateway = FakeGateway()
        engine = gateway.engine
        engine.script = lambda request, choice: engine.tokens_of("x" * 50)
        body = {**BASE[CHAT], "stream": True, "logprobs": True}
        exchange = RawExchange(gateway.app, CHAT, body).start()
        await exchange.until_sent(2)
        exchange.may_send.clear()
        await until(lambda: not engine.num_running)
        exchange.may_send.set()
        await exchange.finished()
        events = parse_events(exchange.body)[:-1]
        assert texts(events) == {0: "x" * 50}
        assert len(events) <= 5
        entries = [
            e
            for chunk in events
            for c in chunk["choices"]
            if c["logprobs"]
            for e in c["logprobs"]["content"]
        ]
        assert "".join(entry["token"] for entry in entries) == "x" * 50

    asyncio.run(main())
