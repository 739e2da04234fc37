"""Raw prompts in their four forms, echo, scoring, and the two shapes of log probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.gateway.logprobs import TextOffsets, chat_logprobs, completion_logprobs, finite
from headrace.gateway.state import Limits
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, parse_events
from headrace.types import TokenAlternative, TokenLogprobs

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def post(client: TestClient, path: str = COMPLETIONS, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=pytest.fail)


def streamed(client: TestClient, path: str = COMPLETIONS, **body: Any) -> dict[int, dict[str, Any]]:
    """Return each choice of a stream with its pieces joined."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    joined: dict[int, dict[str, Any]] = {}
    for chunk in parse_events(response.content)[:-1]:
        for choice in chunk["choices"]:
            whole = joined.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice.get("text", "") or choice.get("delta", {}).get("content", "")
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    whole["logprobs"].setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[104, 105]]),
        ([104, 105], [[104, 105]]),
        ([104], [[104]]),
        (["hi", "h"], [[104, 105], [104]]),
        ([[104], [105, 104]], [[104], [105, 104]]),
    ],
)
def test_forms_of_a_prompt(
    client: TestClient, engine: FakeClient, prompt: object, expected: list[list[int]]
) -> None:
    answer = post(client, prompt=prompt, max_tokens=2)
    assert [request.prompt_token_ids for request in engine.requests] == expected
    assert len({request.request_id for request in engine.requests}) == len(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 2 * len(expected)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")


def test_choices_of_a_batch_are_in_the_order_of_prompts(
    client: TestClient, engine: FakeClient
) -> None:
    engine.script = lambda request, choice: [*request.prompt_token_ids, 48 + choice]
    body: dict[str, Any] = {"prompt": [[65], [66], [67]], "n": 2, "max_tokens": 2, "best_of": 2}
    expected = {0: "A0", 1: "A1", 2: "B0", 3: "B1", 4: "C0", 5: "C1"}
    answer = post(client, **body)
    assert {c["index"]: c["text"] for c in answer["choices"]} == expected
    assert {i: c["text"] for i, c in streamed(client, **body).items()} == expected


def test_echo(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "The capital", "echo": True, "max_tokens": 1, "n": 2}
    answer = post(client, **body)
    assert [c["text"] for c in answer["choices"]] == ["The capitalHello"] * 2
    assert {i: c["text"] for i, c in streamed(client, **body).items()} == {
        0: "The capitalHello",
        1: "The capitalHello",
    }
    assert post(client, prompt=[72, 105], echo=True)["choices"][0]["text"] == "HiHello world"


def test_echo_with_log_probabilities(client: TestClient) -> None:
    body: dict[str, Any] = {
        "prompt": "A é capital",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 2,
        "n": 2,
    }
    answer = post(client, **body)
    assert streamed(client, **body) == {
        choice["index"]: {"text": choice["text"], "logprobs": choice["logprobs"]}
        for choice in answer["choices"]
    }
    for choice in answer["choices"]:
        shape = choice["logprobs"]
        assert shape["tokens"] == ["A", " é", " capital", "Hello", " world"]
        assert shape["text_offset"] == [0, 1, 3, 11, 16]
        for token, start in zip(shape["tokens"], shape["text_offset"], strict=True):
            assert choice["text"][start:].startswith(token)
        assert shape["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert shape["top_logprobs"][0] is None
        assert shape["top_logprobs"][1] == {" é": -0.5, "a": -1.5}


@pytest.mark.parametrize(("num_prompts", "n", "param"), [(1, 8, "n"), (8, 1, "prompt")])
def test_scores_are_bounded(num_prompts: int, n: int, param: str) -> None:
    """One call could otherwise ask for hundreds of megabytes, which every other stream would wait for."""
    gateway = FakeGateway(limits=Limits(max_prompt_logprobs=70))
    body = {"prompt": [[65] * 10] * num_prompts, "n": n, "max_tokens": 1, "echo": True}
    with TestClient(gateway.app) as client:
        refusal = client.post(COMPLETIONS, json={**body, "logprobs": 1})
        assert client.post(COMPLETIONS, json=body).status_code == 200
        fewer = {"prompt": [[65] * 10], "n": 7}
        assert client.post(COMPLETIONS, json={**body, **fewer, "logprobs": 1}).status_code == 200
    gateway.state.observers.close()
    error = refusal.json()["error"]
    assert (refusal.status_code, error["param"]) == (400, param)
    assert "80" in error["message"] and "70" in error["message"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_an_echo_with_special_tokens(
    client: TestClient, engine: FakeClient, as_ids: bool
) -> None:
    """A prompt is echoed as it was written, special tokens too; one of token ids shows none."""
    engine.script = lambda request, choice: engine.tokens_of(" world<|im_start|>!")
    text = "A<|im_end|> é<|im_start|>"
    prompt = engine.tokens_of(text) if as_ids else text
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3}
    whole = post(client, **body)["choices"][0]
    assert whole["text"] == ("A é world!" if as_ids else text + " world!")
    shape = whole["logprobs"]
    for token, start in zip(shape["tokens"], shape["text_offset"], strict=True):
        is_hidden = token.startswith("<|") and (as_ids or start >= len(text))
        assert is_hidden or whole["text"][start:].startswith(token)
    assert streamed(client, **body)[0] == {"text": whole["text"], "logprobs": shape}


def test_offsets_behind_bytes_that_are_no_character(client: TestClient, engine: FakeClient) -> None:
    """Parts of a character in the prompt do not complete with the output: they are two texts."""
    engine.script = lambda request, choice: [*b"\x9f\xe2b", *"é".encode()]
    body: dict[str, Any] = {"prompt": list(b"a\xf0"), "echo": True, "logprobs": 0, "max_tokens": 5}
    whole = post(client, **body)["choices"][0]
    assert whole["text"] == "a\ufffd" + "\ufffd\ufffdbé"
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5, 5]
    assert streamed(client, **body)[0]["logprobs"] == whole["logprobs"]


def test_scoring_a_prompt(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "hi you", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = post(client, **body)
    (choice,) = answer["choices"]
    assert choice["text"] == "hi you" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("hi you")
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}, {}, {}, {}]
    assert answer["usage"]["completion_tokens"] == 0
    assert streamed(client, **body)[0]["text"] == "hi you"
    assert streamed(client, **body)[0]["logprobs"] == choice["logprobs"]


@pytest.mark.parametrize("top", [None, 0, 2])
def test_chat_log_probabilities(client: TestClient, engine: FakeClient, top: int | None) -> None:
    engine.script = lambda request, choice: engine.tokens_of("é Hello 😀")
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": top}
    answer = post(client, CHAT, **body)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "é Hello 😀"
    assert [len(entry["top_logprobs"]) for entry in entries] == [top or 0] * len(entries)
    assert entries == streamed(client, CHAT, **body)[0]["logprobs"]["content"]


def test_completions_logprobs_0(client: TestClient) -> None:
    shape = post(client, prompt="hi", logprobs=0)["choices"][0]["logprobs"]
    assert shape["token_logprobs"] == [-0.5, -0.5]
    assert shape["top_logprobs"] == [{}, {}]
    assert post(client, prompt="hi")["choices"][0]["logprobs"] is None


def test_minus_infinity_is_a_number(client: TestClient, engine: FakeClient) -> None:
    """P07: JSON has no infinity."""
    engine.logprob = -math.inf
    chat = post(client, CHAT, messages=USER, logprobs=True, top_logprobs=3)
    assert chat["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    shape = post(client, prompt="hi", logprobs=5, echo=True)["choices"][0]["logprobs"]
    assert shape["token_logprobs"][1:] == [-9999.0] * 3
    streamed(client, prompt="hi", logprobs=5, echo=True)
    assert [finite(x) for x in (math.nan, -math.inf, math.inf, -1e5, -1.5)] == [
        -9999.0,
        -9999.0,
        -9999.0,
        -9999.0,
        -1.5,
    ]


def test_held_text_keeps_its_log_probabilities(client: TestClient, engine: FakeClient) -> None:
    """Tokens held back as a possible stop string come out later, in order, none lost."""
    engine.script = lambda request, choice: list(b"xENy") + engine.tokens_of("")
    for stop, text in (("END", "xENy"), ("ENy", "x")):
        body: dict[str, Any] = {"prompt": "hi", "stop": stop, "logprobs": 1}
        whole = post(client, **body)["choices"][0]
        assert whole["text"] == text
        assert whole["logprobs"]["tokens"] == list(text)
        assert whole["logprobs"]["text_offset"] == list(range(len(text)))
        assert streamed(client, **body)[0] == {"text": text, "logprobs": whole["logprobs"]}


def alternative(token_id: int, raw: bytes, logprob: float = -1.0) -> TokenAlternative:
    return TokenAlternative(token_id, logprob, raw.decode("utf-8", "replace"), raw)


def test_parts_of_a_character() -> None:
    """They differ although both would print as U+FFFD, and have no width until the last."""
    parts = [alternative(1, b"\xf0\x9f"), alternative(2, b"\x98\x80"), alternative(3, b"!")]
    entries = [TokenLogprobs(part, [part, alternative(4, b"\xf0\x90")]) for part in parts]
    shape = completion_logprobs(entries, TextOffsets(()))
    assert shape["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "!"]
    assert shape["text_offset"] == [0, 0, 1]
    assert shape["top_logprobs"][0] == {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0\\x90": -1.0}
    assert chat_logprobs(entries)["content"][0]["bytes"] == [0xF0, 0x9F]


def test_special_tokens_have_no_width_and_first_spaces_none_either() -> None:
    offsets = TextOffsets({9}, start=-1)
    tokens = [alternative(9, b"<bos>"), alternative(1, b" The"), alternative(2, b" cat")]
    assert [offsets.next(token) for token in tokens] == [0, 0, 3]


def test_the_drawn_token_is_among_the_alternatives_although_unlikely() -> None:
    entry = TokenLogprobs(alternative(1, b"z", -7.0), [alternative(2, b"a", -0.1)])
    shape = completion_logprobs([entry], TextOffsets(()))
    assert shape["top_logprobs"] == [{"a": -0.1, "z": -7.0}]
