"""Chunks written from a template are those encoded one by one, byte for byte."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import SystemClock
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.answer import Answer, AnswerFormat
from headrace.gateway.chat import ChatFormat
from headrace.gateway.completions import CompletionFormat, Echo
from headrace.gateway.state import GatewayState
from headrace.testing.tokenizers import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer
from headrace.types import TokenAlternative, TokenEvent, TokenLogprobs

TINY = Tokenizer(tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False)


class Encoding(Answer):
    """Encodes every chunk anew."""

    def _make_template(self, *arguments: Any) -> None:
        pass


def formats() -> list[AnswerFormat]:
    echo = Echo.of("abc", TINY.encode("abc"), TINY)
    return [
        ChatFormat(False),
        ChatFormat(True),
        CompletionFormat(False, TINY.special_ids, None),
        CompletionFormat(True, TINY.special_ids, None),
        CompletionFormat(False, TINY.special_ids, [echo]),
    ]


def answer(kind: type[Answer], format: AnswerFormat, include_usage: bool) -> Answer:
    state = cast(GatewayState, SimpleNamespace(clock=SystemClock()))
    record = RequestRecord(state, "/v1/x", "r", 0.0)
    envelope = {"id": "x-1", "object": "", "created": 5, "model": 'a "model" \0text\0'}
    return kind(format, record, num_choices=3, envelope=envelope, include_usage=include_usage)


TOKEN = TokenLogprobs(TokenAlternative(97, -0.5, "a", b"a"), [])
events_strategy = st.lists(
    st.builds(
        TokenEvent,
        request_id=st.just("r"),
        index=st.integers(0, 2),
        text=st.one_of(st.text(max_size=5), st.sampled_from(["", "\0text\0", '"\\\u2028\n'])),
        logprobs=st.sampled_from([None, [TOKEN]]),
        finish_reason=st.sampled_from([None, None, None, "stop", "length"]),
    ),
    max_size=12,
)


@given(events=events_strategy, which=st.integers(0, 4), include_usage=st.booleans())
def test_templates_write_what_encoding_writes(
    events: list[TokenEvent], which: int, include_usage: bool
) -> None:
    """S06, S07: keys, nulls and roles too."""
    written = [
        [chunk for event in events for chunk in answer_of.chunks(0, [event])]
        for answer_of in (
            answer(kind, formats()[which], include_usage) for kind in (Answer, Encoding)
        )
    ]
    assert written[0] == written[1]


def test_the_text_of_a_chunk_is_escaped() -> None:
    made = answer(Answer, ChatFormat(False), False)
    made._envelope["model"] = "m"
    texts = ["first", 'a"b\\c\n\0text\0', "😀\u2028"]
    chunks = [made.chunks(0, [TokenEvent(request_id="r", text=text)])[0] for text in texts]
    assert made._templates[0, 0] is not None
    contents = [json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks]
    assert contents == texts
