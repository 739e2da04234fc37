"""What a body may say: every refusal is a 400 that names the field, and nothing reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace.gateway.openai_schema import ChatBody, CompletionBody, Message
from headrace.testing.fake_client import FakeClient, fake_card

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "hi"}}
VOCAB = fake_card().vocab_size


def refused(client: TestClient, path: str, raw: str | bytes, param: str | None) -> dict[str, Any]:
    """Send a raw body, check the whole error object, and that a plain request still works."""
    response = client.post(path, content=raw)
    assert response.status_code == 400, response.text
    error = json.loads(response.content)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] and error["message"]
    assert error["param"] == param, error
    assert client.post(path, json=BASE[path]).status_code == 200
    found: dict[str, Any] = error
    return found


def with_field(path: str, name: str, raw_value: str) -> str:
    base = json.dumps(BASE[path])
    return f'{base[:-1]}, "{name}": {raw_value}}}'


FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "true", "[]"])
def test_numbers_that_are_none(client: TestClient, path: str, name: str, value: str) -> None:
    """P02: NaN passes every comparison, so finiteness comes first."""
    is_json = value not in ("NaN", "Infinity", "-Infinity")
    error = refused(client, path, with_field(path, name, value), name if is_json else None)
    assert is_json == (name in error["message"])


@pytest.mark.parametrize("value", ["NaN", "1e999", '"NaN"', "null", "true", "1e400", "101", "-1e9"])
def test_logit_bias_values(client: TestClient, value: str) -> None:
    """P02, P03: each value by itself."""
    param = None if value == "NaN" else "logit_bias"
    body = with_field(CHAT, "logit_bias", f'{{"5": {value}}}')
    if value in ("1e999", "1e400"):  # refused while parsing, where a key inside a map has no name
        param = "logit_bias"
    refused(client, CHAT, body, param)


@pytest.mark.parametrize(
    "key", ["191222", "-1", "AI", "5.0", "", " 5", "0x5", "٣", "9" * 30, "9" * 5000, "--5", "-"]
)
def test_logit_bias_keys(client: TestClient, key: str) -> None:
    """P03: -1 would bias the wrong token, others end the engine."""
    error = refused(client, CHAT, json.dumps({**BASE[CHAT], "logit_bias": {key: 5}}), "logit_bias")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("name", "value", "param", "words"),
    [
        ("temperature", -1, "temperature", ["-1", "between 0 and"]),
        ("temperature", 1e7, "temperature", ["1e+06"]),
        ("top_p", 1.0001, "top_p", ["between 0 and 1", "1.0001"]),
        ("top_p", -0.1, "top_p", ["-0.1"]),
        ("min_p", 2, "min_p", ["2"]),
        ("presence_penalty", 2.5, "presence_penalty", ["-2 and 2"]),
        ("frequency_penalty", -3, "frequency_penalty", ["-3"]),
        ("repetition_penalty", 0, "repetition_penalty", ["above 0"]),
        ("top_k", -2, "top_k", ["-2"]),
        ("top_k", 1.5, "top_k", ["whole number", "1.5"]),
        ("n", 0, "n", ["0"]),
        ("n", -1, "n", ["-1"]),
        ("n", 129, "n", ["128", "129"]),
        ("n", 10**12, "n", ["128"]),
        ("seed", 2**64, "seed", ["64 bits"]),
        ("seed", 1.5, "seed", ["whole"]),
        ("min_tokens", -1, "min_tokens", ["-1"]),
        ("min_tokens", 10**9, "min_tokens", ["max_tokens"]),
        ("max_tokens", -1, "max_tokens", ["-1", "at least 1"]),
        ("max_tokens", 0, "max_tokens", ["at least 1"]),
        ("stop", "", "stop", ["empty"]),
        ("stop", [""], "stop", ["empty"]),
        ("stop", ["", "END"], "stop", ["empty"]),
        ("stop", ["x"] * 17, "stop", ["16", "17"]),
        ("stop", "x" * 5000, "stop", ["4096", "5000"]),
        ("stop", [1], "stop[0]", ["string", "1"]),
        ("stop_token_ids", [VOCAB + 5], "stop_token_ids", [str(VOCAB + 5)]),
        ("stop_token_ids", [-1], "stop_token_ids", ["-1"]),
        ("stop_token_ids", ["a"], "stop_token_ids[0]", ["whole number"]),
        ("stream_options", {"include_usage": True}, "stream_options", ["stream"]),
        ("stream_options", {}, "stream_options", ["stream"]),
        ("stream", "yes", "stream", ["true or false", '"yes"']),
        ("priority", 2**40, "priority", [str(2**40)]),
        ("slo", {"ttft_ms": 0}, "slo.ttft_ms", ["above 0"]),
        ("slo", {"tpot_ms": -5}, "slo.tpot_ms", ["-5"]),
        ("slo", 5, "slo", ["object"]),
        ("cache_salt", 5, "cache_salt", ["string"]),
        ("cache_ttl", 0, "cache_ttl", ["above 0"]),
        ("response_format", {"type": "json_object"}, "response_format", ["text"]),
        ("response_format", {"type": "foo"}, "response_format", ["text"]),
        ("response_format", "text", "response_format", ["text"]),
        ("structured_outputs", {"regex": "a"}, "structured_outputs", ["not supported"]),
        ("guided_json", {}, "guided_json", ["not supported"]),
        ("model", 5, "model", ["string", "5"]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_refused_on_both(
    client: TestClient, path: str, name: str, value: object, param: str, words: list[str]
) -> None:
    error = refused(client, path, json.dumps({**BASE[path], name: value}), param)
    for word in words:
        assert word in error["message"], error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1_000_000, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_refused_on_chat(client: TestClient, fields: dict[str, Any], param: str) -> None:
    refused(client, CHAT, json.dumps({**BASE[CHAT], **fields}), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", [5]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 3}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_refused_on_completions(client: TestClient, fields: dict[str, Any], param: str) -> None:
    refused(client, COMPLETIONS, json.dumps({**BASE[COMPLETIONS], **fields}), param)


HUGE = "9" * 4000
WHOLE_NUMBERS = ("max_tokens", "n", "top_k", "seed", "min_tokens", "priority")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, sign + HUGE) for name in WHOLE_NUMBERS for sign in ("", "-")),
        ("stop_token_ids", f"[{HUGE}]"),
        ("stop_token_ids", f"[-{HUGE}]"),
        ("logit_bias", f'{{"5": {HUGE}}}'),
        ("logit_bias", f'{{"5": -{HUGE}}}'),
    ],
)
def test_numbers_of_any_size(client: TestClient, path: str, name: str, value: str) -> None:
    """Larger than a float can be, too: the check itself must not fail, nor the message be as long."""
    if (name, value) == ("top_k", HUGE):
        assert client.post(path, content=with_field(path, name, value)).status_code == 200
        return
    error = refused(client, path, with_field(path, name, value), name)
    assert len(error["message"]) < 300


@pytest.mark.parametrize("name", ["logprobs", "best_of", "prompt"])
def test_numbers_of_any_size_on_completions(client: TestClient, name: str) -> None:
    raw = f'{{"prompt": [1], "{name}": {f"[{HUGE}]" if name == "prompt" else HUGE}}}'
    assert len(refused(client, COMPLETIONS, raw, name)["message"]) < 300


def test_a_model_name_of_any_size(client: TestClient) -> None:
    response = client.post(CHAT, json={**BASE[CHAT], "model": "tiny" * 1_000_000})
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 300


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff"}], "prompt": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"chat_template_kwargs": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b', "prompt": []}',
    ],
)
def test_bodies_that_are_no_request(client: TestClient, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


OPTIONAL = {
    CHAT: (
        "model max_tokens max_completion_tokens temperature top_p n stop seed presence_penalty "
        "frequency_penalty logit_bias stream stream_options top_k min_p repetition_penalty "
        "min_tokens stop_token_ids ignore_eos priority cache_salt cache_ttl slo response_format "
        "structured_outputs guided_json guided_regex guided_choice guided_grammar logprobs "
        "top_logprobs tools functions tool_choice function_call add_generation_prompt "
        "continue_final_message chat_template_kwargs chat_template user metadata store"
    ).split(),
    COMPLETIONS: (
        "model max_tokens temperature top_p n stop seed presence_penalty frequency_penalty "
        "logit_bias stream stream_options top_k min_p repetition_penalty min_tokens "
        "stop_token_ids ignore_eos priority cache_salt cache_ttl slo response_format structured_outputs "
        "guided_json guided_regex guided_choice guided_grammar echo logprobs best_of suffix user"
    ).split(),
}


@pytest.mark.parametrize(("path", "body"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody)])
def test_every_optional_field_is_tried_with_null(path: str, body: type[msgspec.Struct]) -> None:
    """P11: a field added later is tried too."""
    assert set(OPTIONAL[path]) >= set(body.__struct_fields__) - {"messages", "prompt"}


def answer_of(client: TestClient, path: str, body: dict[str, Any]) -> object:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"], answer["usage"], answer["model"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_is_the_same_as_absent(client: TestClient, engine: FakeClient, path: str) -> None:
    """P11: one at a time and all together, inside objects and messages too."""
    plain = answer_of(client, path, BASE[path])
    sampling = engine.requests[-1].sampling
    for names in [*([name] for name in OPTIONAL[path]), OPTIONAL[path]]:
        assert answer_of(client, path, {**BASE[path], **dict.fromkeys(names)}) == plain, names
        assert engine.requests[-1].sampling == sampling
    objective = {"ttft_ms": None, "tpot_ms": None}
    nested = {"slo": objective, "stream_options": {"include_usage": None}, "stream": True}
    assert client.post(path, json={**BASE[path], **nested}).status_code == 200
    if path == CHAT:
        others = set(Message.__struct_fields__) - {"role", "content"}
        messages = [{**USER[0], **dict.fromkeys(others)}]
        assert answer_of(client, path, {"messages": messages}) == plain


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_beside_a_prompt_that_is_too_long(client: TestClient, path: str) -> None:
    long = "x" * 300
    body = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    nulls = dict.fromkeys(OPTIONAL[path])
    response = client.post(path, json={**body, **nulls})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields_change_nothing(client: TestClient, engine: FakeClient, path: str) -> None:
    """P18, P26: they are ignored, and an empty list of tools is the same as none, on both endpoints."""
    plain = answer_of(client, path, BASE[path])
    request = engine.requests[-1]
    extras: dict[str, Any] = {
        "store": True,
        "metadata": {"a": [1, {"b": None}]},
        "user": "someone",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "functions": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "request_id": "mine",
        "no_such_field": [1, 2, 3],
        "stop": [],
        "logit_bias": {},
        "suffix": "",
        "top_logprobs": 0,
    }
    assert answer_of(client, path, {**BASE[path], **extras}) == plain
    assert engine.requests[-1].sampling == request.sampling
    assert engine.requests[-1].request_id != "mine"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_reaches_the_engine(client: TestClient, engine: FakeClient, path: str) -> None:
    body = {
        **BASE[path],
        "temperature": 0.5,
        "top_p": 0,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "0": 1.5},
        "stop": "END",
        "stop_token_ids": [3, 3],
        "seed": 2**63,
        "min_tokens": 1,
        "max_tokens": 9,
        "n": 2,
        "ignore_eos": True,
        "priority": -3,
        "cache_salt": "salt",
        "slo": {"ttft_ms": 500, "tpot_ms": 50.5},
    }
    assert client.post(path, json=body).status_code == 200
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.0, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == {5: -100.0, 0: 1.5}
    assert (sampling.stop, sampling.stop_token_ids) == (("END",), (3,))
    assert (sampling.seed, sampling.n, sampling.ignore_eos) == (2**63, 2, True)
    assert (sampling.min_tokens, sampling.max_tokens) == (1, 9)
    assert (request.priority, request.cache_salt) == (-3, "0:salt")
    assert (request.ttft_target_seconds, request.tpot_target_seconds) == (0.5, 0.0505)


@pytest.mark.parametrize(("given", "means"), [(0, 0), (-1, -1), (1, 1), (VOCAB, 0), (10**30, 0)])
def test_top_k_off(client: TestClient, engine: FakeClient, given: int, means: int) -> None:
    assert client.post(CHAT, json={**BASE[CHAT], "top_k": given}).status_code == 200
    assert engine.requests[-1].sampling.top_k == means


def test_a_body_that_is_too_large(client: TestClient) -> None:
    response = client.post(CHAT, content=b" " * ((16 << 20) + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
