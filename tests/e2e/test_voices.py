"""Known tokens through process, sampler, detokenizer and HTTP: what streams say, and how they end.

One server says another script for each last character of a prompt, so all of it costs one start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.testing.fake_gateway import parse_events
from headrace.testing.live import until_idle
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
EMOJI = "\U0001fae0".encode()  # not a token of its own: its bytes come in two tokens
EMOJI_PROMPT, STOPS, HELD, MARK, SILENT, HELLO, SPLIT, DOUBLE = "12345678"
SCRIPTS: dict[str, list[str | bytes]] = {
    EMOJI_PROMPT: ["ob ", EMOJI[:2], EMOJI[2:], " ke"],
    STOPS: ["ABC", "DEF", "G", "HI", "J"],
    HELD: ["UNO", " DUE", " TRE"],
    MARK: ["Is it", "?\n", "no"],
    SILENT: [],
    HELLO: ["Hello", " brave", " new", " world", "!"],
    SPLIT: ["a", "ST", "OP", "b"],
    DOUBLE: ["one", " two", " two", "\n"],
}
FAILING = "0"
"""Any other prompt: three tokens, then a row of logits that is no number."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("script") / "voices.json"
    write_script(
        path,
        ["one", " two", " three", " four", " five"],
        fail_after=3,
        when=SCRIPTS,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    with started_server(["--model", f"scripted:{path}"]) as server:
        yield server.url


def post(url: str, json: object) -> httpx.Response:
    return httpx.post(url, json=json, timeout=60, verify=False)


def body_of(path: str, prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": prompt, **fields}
    return {"messages": [{"role": "user", "content": prompt}], **fields}


def plain(url: str, path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = post(url + path, json=body_of(path, prompt, fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.content, parse_constant=pytest.fail)
    return found


def streamed(url: str, path: str, prompt: str, **fields: Any) -> list[Any]:
    body = {**body_of(path, prompt, fields), "stream": True}
    answer = post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    events = parse_events(answer.content)
    assert events.pop() == "[DONE]"
    return events


def text_of(choice: dict[str, Any]) -> str:
    if "delta" in choice:
        return str(choice["delta"].get("content", ""))
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def pieces_of(events: list[Any]) -> list[str]:
    """The texts of the first choice that are not empty, as they came."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    return [piece for piece in map(text_of, choices) if piece]


def said(url: str, path: str, prompt: str, **fields: Any) -> tuple[list[str], str]:
    """Return the pieces of a stream and how it ended, once both modes agree."""
    answer = plain(url, path, prompt, **fields)
    events = streamed(url, path, prompt, **fields)
    pieces = pieces_of(events)
    reason = events[-1]["choices"][0]["finish_reason"]
    assert "".join(pieces) == text_of(answer["choices"][0])
    assert reason == answer["choices"][0]["finish_reason"]
    return pieces, reason


@PATHS
def test_an_emoji_of_two_tokens(url: str, path: str) -> None:
    """S01: no U+FFFD in any delta, and the same text in both modes."""
    pieces, reason = said(url, path, EMOJI_PROMPT)
    assert ("".join(pieces), reason) == ("ob \U0001fae0 ke", "stop")
    cut, reason = said(url, path, EMOJI_PROMPT, max_tokens=2)
    assert ("".join(cut), reason) == ("ob \ufffd", "length")  # half a character is all there is


@PATHS
@pytest.mark.parametrize(
    ("stop", "text"),
    [(["DE"], "ABC"), (["DEFGHIJ"], "ABC"), (["FG", "DEFGHIJ"], "ABCDE"), (["XY"], "ABCDEFGHIJ")],
)
def test_stop_strings_across_and_inside_tokens(
    url: str, path: str, stop: list[str], text: str
) -> None:
    """S03: the text ends before the earliest match, and nothing of it is ever sent."""
    pieces, reason = said(url, path, STOPS, stop=stop)
    assert ("".join(pieces), reason) == (text, "stop")


@PATHS
def test_what_is_held_for_a_stop_string_is_delivered(url: str, path: str) -> None:
    """S04: at EOS, at max_tokens, and where one token holds the last character and the stop."""
    for fields, reason in (({}, "stop"), ({"max_tokens": 3}, "length")):
        pieces, ended = said(url, path, HELD, stop=["TRE\nAAAA"], **fields)
        assert ("".join(pieces), ended) == ("UNO DUE TRE", reason)
    pieces, ended = said(url, path, MARK, stop="\n")
    assert ("".join(pieces), ended) == ("Is it?", "stop")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [HELLO, SILENT])
def test_roles_and_contents_of_deltas(url: str, prompt: str, n: int) -> None:
    """S06: each choice's first chunk has the role, later ones omit it, content is never null."""
    seen: set[int] = set()
    for event in streamed(url, CHAT, prompt, n=n):
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("role") == (None if choice["index"] in seen else "assistant")
            assert ("role" in delta) == (choice["index"] not in seen)
            assert isinstance(delta.get("content", ""), str)
            seen.add(choice["index"])
    assert seen == set(range(n))


@PATHS
@pytest.mark.parametrize("n", [1, 2])
def test_finish_reasons_are_null_until_the_end(url: str, path: str, n: int) -> None:
    """S07, S08: the key is always there, null but once per choice, in a chunk without text."""
    events = streamed(url, path, HELLO, n=n, max_tokens=5)
    choices = [choice for event in events for choice in event["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"] is not None]
    assert all("finish_reason" in choice for choice in choices)
    assert sorted(choice["index"] for choice in ends) == list(range(n))
    assert {choice["finish_reason"] for choice in ends} == {"length"}
    assert {text_of(choice) for choice in ends} == {""}
    if path == CHAT:
        assert [choice["delta"] for choice in ends] == [{}] * n


@PATHS
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, None])
def test_usage_only_when_asked(url: str, path: str, options: dict[str, bool] | None) -> None:
    """S09: one chunk without choices behind all ends, or none at all."""
    events = streamed(url, path, HELLO, n=2, stream_options=options)
    without = [place for place, event in enumerate(events) if not event["choices"]]
    if options is None or not options["include_usage"]:
        assert without == [] and not any("usage" in event for event in events)
        return
    assert without == [len(events) - 1]
    assert all(event["usage"] is None for event in events[:-1])
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 12 and usage["prompt_tokens"] == 1
    assert usage["total_tokens"] == 13


@PATHS
def test_a_step_that_breaks_after_three_tokens(url: str, path: str) -> None:
    """S12: one error event and the end, without [DONE] or finish_reason; counted as a failure."""
    before = until_idle(url)
    body = {**body_of(path, FAILING, {}), "stream": True}
    answer = post(url + path, json=body)
    *chunks, last = parse_events(answer.content)
    assert "".join(pieces_of(chunks)) == "one two three"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert last["error"]["type"] == "server_error" and last["error"]["code"] == "engine_failed"
    whole = post(url + path, json=body_of(path, FAILING, {}))
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_failed"
    after = until_idle(url)
    assert after.value("request_failures_total") == before.value("request_failures_total") + 2
    assert said(url, path, HELLO)[1] == "stop"


@PATHS
@pytest.mark.parametrize("top", [None, 0, 3])
def test_log_probabilities_of_held_text(url: str, path: str, top: int | None) -> None:
    """G02, P06: a stream's entries are the whole answer's, none lost where text was held back."""
    fields: dict[str, Any] = {"stop": ["STOX"]}
    fields |= {"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top or 0}
    whole = plain(url, path, SPLIT, **fields)["choices"][0]
    entries: list[Any] = []
    for event in streamed(url, path, SPLIT, **fields):
        for choice in event["choices"]:
            found = _entries(choice["logprobs"])
            assert "".join(entry[0] for entry in found) == text_of(choice)
            entries += found
    assert entries == _entries(whole["logprobs"])
    assert [entry[0] for entry in entries] == ["a", "ST", "OP", "b"]
    assert {entry[2] for entry in entries} == {top or 0}
    if path == COMPLETIONS:
        assert whole["logprobs"]["text_offset"] == [0, 1, 3, 5]


def _entries(logprobs: Any) -> list[tuple[str, float, int]]:
    """Token, log probability and number of alternatives of each entry, in either shape."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        found = logprobs["content"]
        return [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in found]
    names = ("tokens", "token_logprobs", "top_logprobs")
    return [
        (token, logprob, len(top))
        for token, logprob, top in zip(*(logprobs[name] for name in names), strict=True)
    ]


@PATHS
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (None, "one two two\n"),
        ([], "one two two\n"),
        (" ", "one"),
        (["\n"], "one two two"),
        (["v", "w", "x", "y", "z"], "one t"),
        (["o two\n", " two two"], "one"),
    ],
)
def test_stop_in_all_its_forms(url: str, path: str, stop: Any, text: str) -> None:
    """P19: none, a list without entries, a space, a newline, five at once, overlapping ones."""
    pieces, reason = said(url, path, DOUBLE, stop=stop)
    assert ("".join(pieces), reason) == (text, "stop")


@PATHS
@pytest.mark.parametrize("stop", ["", [""], ["", "END"]])
def test_empty_stop_strings_are_refused(url: str, path: str, stop: Any) -> None:
    """P19: every text contains the empty string, so it can neither stop at once nor be meant."""
    answer = post(url + path, json=body_of(path, HELLO, {"stop": stop}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop"
    assert "".join(said(url, path, HELLO)[0]) == "Hello brave new world!"


def test_an_absurd_temperature_has_its_effect(scripted_server: StartedServer) -> None:
    """P27: at 1e6 even an overwhelming logit is one among many; refused beyond."""
    url = scripted_server.url
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0, "seed": 1}
    wild = plain(url, COMPLETIONS, "x", temperature=1e6, **fields)
    assert len(set(wild["choices"][0]["logprobs"]["tokens"])) > 25
    tame = plain(url, COMPLETIONS, "x", temperature=1, **fields)
    assert tame["choices"][0]["text"].startswith("Hello brave new world!Hello")
    body = {"prompt": "x", "temperature": 1.1e6}
    assert post(url + COMPLETIONS, json=body).status_code == 400
