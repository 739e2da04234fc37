"""Text of a token stream, as soon as it is certain.

Only the bytes of an incomplete character are held; everything before them has been sent. Text joined
equals `Tokenizer.decode(ids, continuation=True)`, and a token costs its own bytes, however long the
stream is: a token that is text by itself, as most are, costs one look into a table that all choices share.
"""

from __future__ import annotations

import codecs

from headrace.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The incremental decoder of one choice. It sees generated tokens only, never the prompt."""

    __slots__ = ("_decoder", "_holds_bytes", "_skipped", "_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._texts = tokenizer.whole_texts(skip_special)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._holds_bytes = False

    def append(self, token_id: int) -> str:
        """Return the text that is now certain; "" while a character is incomplete."""
        if not self._holds_bytes:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        if token_id in self._skipped:
            return ""
        return self._decode(token_id)

    def flush(self) -> str:
        """Return what an incomplete character becomes when nothing follows: U+FFFD, or ""."""
        if self._decoder is None:
            return ""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._holds_bytes = False
        return text

    def _decode(self, token_id: int) -> str:
        """Decode a token's bytes behind those held; note it where it needs and leaves none."""
        if self._decoder is None:
            self._decoder = _UTF8("replace")
        held_before = self._holds_bytes
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._holds_bytes = bool(self._decoder.getstate()[0])
        if not held_before and not self._holds_bytes:
            self._texts[token_id] = text
        return text
