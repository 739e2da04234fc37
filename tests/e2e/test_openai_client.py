"""The `openai` package, unmodified, against a real server process."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from headrace.testing.server import StartedServer

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]
TEXT = "Hello brave new world!"


@pytest.fixture(scope="module")
def client(scripted_server: StartedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{scripted_server.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=model(client), messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    details = answer.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None


def test_streamed_chat_equals_the_plain_one(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=model(client),
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=model(client), messages=MESSAGES, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model(client),
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert all(entry.logprob <= 0 for entry in logprobs.content)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=model(client), prompt=["a", "b"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.text for choice in answer.choices} == {"Hello brave new world"}
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=model(client),
            messages=MESSAGES,
            temperature=-1,
        )
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=model(client),
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert tools.value.param == "tools"
    answer = client.chat.completions.create(model=model(client), messages=MESSAGES, tools=[])
    assert answer.choices[0].message.content == TEXT
