"""Text of a token stream, as soon as it is certain.

Only the bytes of an incomplete character are held; everything before them has been sent. Text joined
equals `Tokenizer.decode(ids, continuation=True)`, and a token costs its own bytes, however long the
stream is.
"""

from __future__ import annotations

import codecs

from headrace.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The incremental decoder of one choice. It sees generated tokens only, never the prompt."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _UTF8("replace")

    def append(self, token_id: int) -> str:
        """Return the text that is now certain; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return what an incomplete character becomes when nothing follows: U+FFFD, or ""."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
