"""A tiny random model over HTTP: what is refused harms nobody beside it, and what is asked for is done."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.testing.live import RawClient, until_idle, until_numbers
from headrace.testing.server import started_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "the water mill"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "the water mill"},
}
CONTEXT = 1536


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Callable[..., Path]) -> Iterator[str]:
    settings = {
        "models.0.engine.dtype": "float32",
        "models.0.engine.deterministic": "true",
        "models.0.engine.max_model_len": CONTEXT,
        "models.0.engine.kv_memory": "4MiB",
    }
    arguments = ["--model", str(tiny_checkpoint("llama"))]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    with started_server(arguments) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120, verify=False) as client:
        yield client
    until_idle(url)


@pytest.fixture(scope="module")
def vocab_size(client: httpx.Client) -> int:
    """The smallest token id that is refused."""
    for token in itertools.count(200):
        body = {"prompt": [token], "max_tokens": 1}
        if client.post(COMPLETIONS, json=body).status_code == 400:
            return token
    raise AssertionError


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(COMPLETIONS, json={**BASE[COMPLETIONS], **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.content, parse_constant=pytest.fail)
    return found


def text(client: httpx.Client, **fields: Any) -> str:
    return str(complete(client, **fields)["choices"][0]["text"])


def bad_bodies(vocab_size: int) -> Iterator[tuple[str, bytes, str]]:
    """(path, body, parameter named by the refusal) of every kind that is refused."""
    both: list[tuple[str, str]] = [
        ("temperature", "1e999"),
        ("temperature", "-1"),
        ("temperature", '"NaN"'),
        ("top_p", "1.0001"),
        ("top_p", "-0.1"),
        ("min_p", '"NaN"'),
        ("presence_penalty", "1e999"),
        ("frequency_penalty", "-1e999"),
        ("logit_bias", '{"191222": 5}'),
        ("logit_bias", '{"-1": 5}'),
        ("logit_bias", '{"AI": -100}'),
        ("logit_bias", '{"5": 1000}'),
        ("logit_bias", f'{{"{vocab_size}": 5}}'),
        ("stop", '""'),
        ("n", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "1000000000"),
        ("stream_options", '{"include_usage": true}'),
        ("response_format", '{"type": "nonsense"}'),
    ]
    for path, (name, value) in itertools.product(BASE, both):
        yield path, f'{json.dumps(BASE[path])[:-1]}, "{name}": {value}}}'.encode(), name
        if name == "top_p":
            token = f'"stop_token_ids": [{vocab_size + 5}], "min_tokens": 4'
            yield path, f"{json.dumps(BASE[path])[:-1]}, {token}}}".encode(), "stop_token_ids"
    for path, fields, name in (
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": 1_000_000, "logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": 25}, "logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": [vocab_size]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * CONTEXT}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [*USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ):
        yield path, json.dumps({**BASE[path], **fields}).encode(), name


def test_what_is_refused_harms_nobody(client: httpx.Client, vocab_size: int) -> None:
    """P02, P03, P04, P05, P10, P14, P16, P24 beside a greedy neighbour: it says what it says alone."""
    long = {"max_tokens": CONTEXT - 100, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    alone = complete(client, **long)["choices"]
    bad = list(bad_bodies(vocab_size))
    while bad:
        beside: list[Any] = []
        neighbour = threading.Thread(
            target=lambda found: found.append(complete(client, **long)["choices"]), args=(beside,)
        )
        neighbour.start()
        while bad and neighbour.is_alive():
            path, body, name = bad.pop()
            answer = client.post(path, content=body)
            assert answer.status_code == 400, (body, answer.text)
            error = json.loads(answer.content, parse_constant=pytest.fail)["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", name), body
            assert error["code"] and error["message"]
        neighbour.join()
        assert beside == [alone]
    assert text(client, max_tokens=3)


def test_raw_numbers_that_are_none(client: httpx.Client) -> None:
    """P02: NaN and Infinity are not JSON; the refusal is."""
    for name, value in itertools.product(("temperature", "min_p"), ("NaN", "-Infinity")):
        body = f'{{"prompt": "x", "{name}": {value}}}'
        answer = client.post(COMPLETIONS, content=body.encode())
        assert answer.status_code == 400
        assert json.loads(answer.content, parse_constant=pytest.fail)["error"]["message"]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.1}, {"top_p": 0, "min_p": 1}])
def test_filters_leave_log_probabilities_finite(
    client: httpx.Client, filters: dict[str, Any]
) -> None:
    """P07: alternatives that no filter lets through still have their number; the prompt's are untouched."""
    fields = {"echo": True, "logprobs": 5, "max_tokens": 4, "seed": 3, "temperature": 0.7}
    filtered = complete(client, **fields, **filters)["choices"][0]["logprobs"]
    free = complete(client, **fields)["choices"][0]["logprobs"]
    prompt = complete(client, **{**fields, "max_tokens": 0})["choices"][0]["logprobs"]
    count = len(prompt["tokens"])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert filtered[name][:count] == free[name][:count] == prompt[name]
    tops = filtered["top_logprobs"][1:]
    assert all(len(top) >= 5 for top in tops)
    assert all(-50 < value <= 0 for top in tops for value in top.values())


def test_top_k_off_and_one(client: httpx.Client) -> None:
    """P09: 0 and -1 are off, so texts differ by seed; 1 is greedy."""
    greedy = text(client, temperature=0, max_tokens=24)
    by_seed = set()
    for seed in range(5):
        fields = {"temperature": 2, "seed": seed, "max_tokens": 24, "ignore_eos": True}
        off = {text(client, **fields, top_k=top_k) for top_k in (0, -1)}
        assert off == {text(client, **fields)}
        by_seed |= off
        assert text(client, temperature=2, seed=seed, top_k=1, max_tokens=24) == greedy
    assert len(by_seed) == 5


def test_top_p_at_its_ends(client: httpx.Client) -> None:
    """P10: 1 changes nothing, 0 keeps the best token alone."""
    fields = {"temperature": 1.5, "seed": 4, "max_tokens": 24}
    assert text(client, **fields, top_p=1) == text(client, **fields)
    assert text(client, **fields, top_p=0) == text(client, temperature=0, max_tokens=24)


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_scoring_computes_and_generates_nothing(client: httpx.Client, logprobs: int) -> None:
    """P12: max_tokens 0 with echo gives the prompt's log probabilities; without, it is refused."""
    answer = complete(client, echo=True, logprobs=logprobs, max_tokens=0, temperature=0)
    shape = answer["choices"][0]["logprobs"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["text"] == "".join(shape["tokens"]) == "the water mill"
    assert shape["token_logprobs"][0] is None
    assert all(value < 0 for value in shape["token_logprobs"][1:])
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0}).status_code == 400


def test_prompts_at_the_edge_of_the_context(client: httpx.Client) -> None:
    """P14: the numbers of the refusal are the right ones; what fits exactly is served."""
    for length in (CONTEXT, CONTEXT + 1):
        answer = client.post(COMPLETIONS, json={"prompt": [9] * length})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{length} tokens" in error["message"] and str(CONTEXT) in error["message"]
    edge = [9] * (CONTEXT - 1)
    for fields in ({}, {"max_tokens": 1}):
        whole = complete(client, prompt=edge, ignore_eos=True, **fields)
        counts = [whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
        assert counts == [CONTEXT - 1, 1]
        assert whole["choices"][0]["finish_reason"] == "length"
    answer = client.post(COMPLETIONS, json={"prompt": edge, "max_tokens": 2})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_both_names_of_max_tokens(client: httpx.Client) -> None:
    """P15: the newer name is honoured, and wins where both are given."""
    for fields in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        body = {**BASE[CHAT], **fields, "ignore_eos": True}
        answer = client.post(CHAT, json=body).json()
        assert answer["usage"]["completion_tokens"] == 5


def seeded_choices(client: httpx.Client, stop: str) -> list[tuple[str, str]]:
    fields = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 60, "stop": [stop]}
    choices = complete(client, **fields)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    whole = [(choice["text"], choice["finish_reason"]) for choice in choices]
    texts, reasons = ["", "", ""], ["", "", ""]
    body = {**BASE[COMPLETIONS], **fields, "stream": True}
    with client.stream("POST", COMPLETIONS, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[len("data: ") :])["choices"]
                assert not reasons[choice["index"]], "nothing follows the end of a choice"
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or ""
    assert list(zip(texts, reasons, strict=True)) == whole
    return whole


def test_seeded_choices_differ_and_repeat_as_a_set(client: httpx.Client) -> None:
    """P20: each ends for itself, at another length, and the rest go on; twice, in both modes."""
    (free, *_), _, _ = seeded_choices(client, "never said")
    stop = free[len(free) // 3 :][:2]
    choices = seeded_choices(client, stop)
    assert choices == seeded_choices(client, stop)
    assert len({text for text, _ in choices}) == 3
    assert len({len(text) for text, _ in choices}) > 1
    assert choices[0] == (free[: free.index(stop)], "stop")


def test_salts_keep_equal_prompts_apart(client: httpx.Client) -> None:
    """C02: the same salt hits the cache, another does not."""
    prompt = "a secret of the mill: " + "water wheel " * 40
    for salt, is_cached in (("a", False), ("a", True), ("b", False), ("b", True), ("c", False)):
        usage = complete(client, prompt=prompt, cache_salt=salt, max_tokens=1)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == is_cached, salt


def test_more_than_the_whole_pool_is_refused_and_blocks_nobody(
    url: str, client: httpx.Client
) -> None:
    """K01: the answer names the limit, and short ones beside it finish."""
    long = RawClient(url).post(
        COMPLETIONS, {**BASE[COMPLETIONS], "max_tokens": CONTEXT - 100, "ignore_eos": True}
    )
    until_numbers(url, lambda now: now.value("requests_running") == 1)
    answer = client.post(COMPLETIONS, json={"prompt": [9] * (CONTEXT * 8)})
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.json()["error"]["message"]
    for _ in range(5):
        assert text(client, max_tokens=5)
    long.leave()
    assert until_idle(url).lowest() >= 0
