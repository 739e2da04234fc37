"""Log probabilities in the two shapes OpenAI has for them, finite whatever the engine says.

A token that is no text by itself (part of a character) has its bytes; in the completions shape, which
has no place for bytes, it is written "bytes:\\xf0\\x9f" as OpenAI does, so that two such tokens differ.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.types import TokenAlternative, TokenLogprobs

LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return a number JSON can write: -9999.0 stands for minus infinity."""
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return {"content": [...], "refusal": null}, one entry per token."""
    return {
        "content": [
            {**_chat_token(entry.chosen), "top_logprobs": [_chat_token(top) for top in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(token: TokenAlternative) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}


class TextOffsets:
    """Where each token of a text starts in it, in characters. Hidden (special) tokens have no width."""

    def __init__(self, hidden_ids: Collection[int] = (), *, start: int = 0) -> None:
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = start

    def next(self, token: TokenAlternative) -> int:
        """Return the offset of `token` and move behind it.

        A part of a character starts where the character does; a token behind bytes that never became
        one starts behind the U+FFFD that stands for them.
        """
        if token.token_id in self._hidden_ids:
            return max(self._length, 0)
        pending, _ = self._decoder.getstate()
        if pending and not _continues(pending, token.raw):
            self._finish_text()
        offset = max(self._length, 0)
        self._length += len(self._decoder.decode(token.raw))
        return offset

    @property
    def length(self) -> int:
        """Characters of the text so far."""
        return self._length

    def start_text(self, hidden_ids: Collection[int]) -> None:
        """Go on behind what came so far with tokens of a text that was decoded by itself."""
        self._finish_text()
        self._hidden_ids = hidden_ids

    def _finish_text(self) -> None:
        self._length += len(self._decoder.decode(b"", final=True))


def _continues(pending: bytes, raw: bytes) -> bool:
    """Whether the bytes of an incomplete character can go on with the first of `raw`."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(pending + raw[:1])
    except UnicodeDecodeError:
        return False
    return True


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None],
    offsets: TextOffsets,
    *,
    first_prompt_token: TokenAlternative | None = None,
) -> dict[str, Any]:
    """Return {tokens, token_logprobs, top_logprobs, text_offset}.

    An entry of None is the first token of an echoed prompt, `first_prompt_token`, which nothing
    predicts: its log probability and alternatives are null.
    """
    shape: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        token = first_prompt_token if entry is None else entry.chosen
        assert token is not None
        shape["tokens"].append(_token_name(token))
        shape["token_logprobs"].append(None if entry is None else finite(entry.chosen.logprob))
        shape["top_logprobs"].append(None if entry is None else _alternatives(entry))
        shape["text_offset"].append(offsets.next(token))
    return shape


class PromptScores:
    """The log probabilities of one echoed prompt, written once for all of its choices."""

    def __init__(
        self,
        entries: Sequence[TokenLogprobs | None],
        first_token: TokenAlternative,
        offsets: TextOffsets,
    ) -> None:
        """`offsets` starts where the prompt does; it is used up."""
        shape = completion_logprobs(entries, offsets, first_prompt_token=first_token)
        offsets.start_text(())
        self.end_offset = offsets.length
        self._written = {name: _items(values) for name, values in shape.items()}

    def followed_by(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the shape of the prompt and of what a choice said after it, as raw JSON."""
        return {
            name: msgspec.Raw(b"[" + b",".join(filter(None, (start, _items(output[name])))) + b"]")
            for name, start in self._written.items()
        }


def _items(values: list[Any]) -> bytes:
    return msgspec.json.encode(values)[1:-1]


def _alternatives(entry: TokenLogprobs) -> dict[str, float]:
    """Return the alternatives and, where any are asked for, the token itself, best first."""
    alternatives: dict[str, float] = {}
    for token in (*entry.top, *((entry.chosen,) if entry.top else ())):
        alternatives.setdefault(_token_name(token), finite(token.logprob))
    return alternatives


def _token_name(token: TokenAlternative) -> str:
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
