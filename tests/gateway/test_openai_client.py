"""The `openai` package, unmodified, over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_server import Served

from headrace.errors import RateLimited, Unavailable
from headrace.testing.fake_gateway import parse_events

USER: list[Any] = [{"role": "user", "content": "hi"}]


def client(served: Served, **options: Any) -> openai.OpenAI:
    url = f"http://127.0.0.1:{served.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    engine = server.gateway.engine
    engine.refusal = None
    engine.fails_after = None
    engine.script = lambda request, choice: engine.tokens_of("Hello world")
    engine.become_ready()


@pytest.fixture
def sdk(served: Served) -> Iterator[openai.OpenAI]:
    with client(served) as opened:
        yield opened


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="tiny", messages=USER)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello world"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id and answer.id == "chatcmpl-" + answer._request_id


def test_streamed_chat(sdk: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    usage = None
    with sdk.chat.completions.create(
        model="tiny", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage or usage
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert usage is not None and usage.completion_tokens == 6


def test_the_stream_helper_accumulates(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="tiny", messages=USER, logprobs=True) as stream:
        stream.until_done()
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=2, max_tokens=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    (entry,) = logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("Hello", -0.5, list(b"Hello"))
    assert [top.token for top in entry.top_logprobs] == ["Hello", "a"]


def test_completions_and_models(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="tiny", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").object == "model"
    streamed = sdk.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(c.text for chunk in streamed for c in chunk.choices) == "Hello world"


def test_error_classes(served: Served, sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(model="tiny", messages=USER, temperature=-1)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        chat.create(model="nope", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="tiny", input="a")
    engine = served.gateway.engine
    engine.refusal = RateLimited("slow down", retry_after_seconds=1)
    with pytest.raises(openai.RateLimitError):
        chat.create(model="tiny", messages=USER)
    engine.refusal = Unavailable("full", retry_after_seconds=7)
    with pytest.raises(openai.InternalServerError) as full:
        chat.create(model="tiny", messages=USER, stream=True)
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "7"
    engine.refusal = None
    engine.fails_after = 1
    with pytest.raises(openai.InternalServerError) as broken:
        chat.create(model="tiny", messages=USER)
    assert broken.value.status_code == 500
    with pytest.raises(openai.APIError, match="the step broke"):
        list(chat.create(model="tiny", messages=USER, stream=True))


def test_leaving_a_stream_aborts(served: Served, sdk: openai.OpenAI) -> None:
    engine = served.gateway.engine
    engine.script = lambda request, choice: [97]
    engine.step_seconds = 0.005
    before = len(engine.aborted)
    with sdk.chat.completions.create(
        model="tiny", messages=USER, stream=True, max_tokens=200
    ) as stream:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client(served, timeout=0.1).chat.completions.create(
            model="tiny", messages=USER, max_tokens=200
        )
    for _ in range(400):
        if len(engine.aborted) == before + 2 and not served.gateway.state.admission.num_tickets:
            break
        threading.Event().wait(0.01)
    engine.step_seconds = 0.0
    assert len(engine.aborted) == before + 2
    served.gateway.assert_idle()


def test_one_connection_carries_answers_of_every_kind(served: Served) -> None:
    """Stream, JSON, refusal, stream on one kept-alive socket: each parses alone, no stray bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    path = "/v1/chat/completions"
    for fields in ({"stream": True}, {}, {"temperature": -1}, {"stream": True}, {}):
        body = json.dumps({"messages": USER, **fields})
        connection.request("POST", path, body)
        response = connection.getresponse()
        raw = response.read()
        if "temperature" in fields:
            assert response.status == 400 and json.loads(raw)["error"]["param"] == "temperature"
        elif fields:
            assert parse_events(raw)[-1] == "[DONE]"
        else:
            assert json.loads(raw)["object"] == "chat.completion"
    connection.close()
