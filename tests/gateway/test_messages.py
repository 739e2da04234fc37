"""Chat messages: what templates get of them, and which one is bad."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{}], "messages[0].role"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([*USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([*USER, {"role": "assistant", "tool_calls": []}], "messages[1].content"),
        ([*USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([*USER, {"role": 5, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [*USER, {"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "messages[1].tool_calls[0]",
        ),
    ],
)
def test_bad_messages_are_named_by_index(client: TestClient, messages: object, param: str) -> None:
    """P16: never a 500, never silently accepted."""
    response = client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param in error["message"] or param == "messages"
    assert client.post(CHAT, json={"messages": USER}).status_code == 200


def test_unknown_message_fields_change_nothing(client: TestClient, engine: FakeClient) -> None:
    """P18: clients send names, ids and refusals back."""
    plain = client.post(CHAT, json={"messages": USER}).json()
    extras: dict[str, Any] = {
        "name": "bob",
        "id": "msg_1",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    messages = [{**USER[0], **extras}]
    answer = client.post(CHAT, json={"messages": messages}).json()
    assert (answer["choices"], answer["usage"]) == (plain["choices"], plain["usage"])
    assert engine.requests[0].prompt_token_ids == engine.requests[1].prompt_token_ids


def prompt_text(engine: FakeClient) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special=False)


def test_messages_become_the_templates_prompt(client: TestClient, engine: FakeClient) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert client.post(CHAT, json={"messages": messages}).status_code == 200
    assert prompt_text(engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_system_only_is_no_server_error(client: TestClient) -> None:
    system = [{"role": "system", "content": "x"}]
    assert client.post(CHAT, json={"messages": system}).status_code == 200


@pytest.mark.parametrize("content", ["To be ", [{"type": "text", "text": "To be "}]])
def test_continuing_the_last_message(
    client: TestClient, engine: FakeClient, content: object
) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True}
    for flag in (None, False):
        answer = client.post(CHAT, json={**body, "add_generation_prompt": flag}).json()
        assert prompt_text(engine).endswith("<|im_start|>assistant\nTo be ")
        assert answer["choices"][0]["message"]["content"] == "Hello world"
    body["add_generation_prompt"] = False
    body["continue_final_message"] = False
    client.post(CHAT, json=body)
    assert prompt_text(engine).endswith("To be <|im_end|>\n")
