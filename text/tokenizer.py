"""Text to token ids and back, for one model.

The rule of BOS: raw text is given exactly one where the model wants one, so text that already starts
with it gets none; a rendered chat is taken as it is, because its template writes what the model wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from headrace.errors import InvalidRequest, ModelError
from headrace.text.token_bytes import byte_rule


class _TokenizerFile(msgspec.Struct):
    """What is read of a tokenizer.json here; its vocabulary would cost many times its size."""

    decoder: Any = None


class Tokenizer:
    """A tokenizer.json with the special tokens of its model. Safe to share between threads."""

    def __init__(
        self, tokenizer_json: str, *, special_tokens: Mapping[str, str], add_bos_token: bool
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            decoder = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._rule = byte_rule(decoder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.add_bos_token = add_bos_token
        self.bos_token_id = self._special_id("bos_token")
        if add_bos_token and self.bos_token_id is None:
            raise ModelError(
                "the model wants a BOS token before raw text, but names no bos_token; "
                f"special tokens are {self.special_tokens}"
            )
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: tuple[dict[int, str], dict[int, str]] = (
            {},
            dict.fromkeys(self.special_ids, ""),
        )

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the ids of raw text. `add_bos` None: as the model says.

        Special tokens written in the text are parsed. A text that starts with BOS gets no second one.
        """
        return self._with_bos(self._encode(text), add_bos)

    def encode_batch(self, texts: Sequence[str], *, add_bos: bool | None = None) -> list[list[int]]:
        """Return encode(text) of each, on all cores where that helps."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            for text in texts:
                _check_text(text)
            raise InvalidRequest(
                f"the text cannot be tokenized: {error}", param="prompt"
            ) from error
        return [self._with_bos(encoding.ids, add_bos) for encoding in encodings]

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered chat: special tokens in it are parsed, none is added."""
        return self._encode(text)

    def decode(
        self, ids: Sequence[int], skip_special: bool = True, *, continuation: bool = False
    ) -> str:
        """Return the text of `ids`; what is no UTF-8 becomes U+FFFD.

        `continuation`: the ids follow other text, so a first space that SentencePiece would take for
        its own prefix is kept.
        """
        special = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in special)
        text = data.decode("utf-8", "replace")
        return text if continuation else text.removeprefix(self._rule.strip_prefix)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; b"" for an id that is no token (a padded vocabulary)."""
        data = self._bytes.get(token_id)
        if data is not None:
            return data
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        data = self._rule.bytes_of(token, token_id in self._added_ids)
        self._bytes[token_id] = data
        return data

    def whole_texts(self, skip_special: bool) -> dict[int, str]:
        """Return the table of tokens that are text wherever they stand, shared by all detokenizers.

        They fill it as tokens come up, so a vocabulary of 262,144 costs what is used of it.
        """
        return self._whole_texts[skip_special]

    def token_text(self, token_id: int) -> str:
        """Return a token's bytes as text, special tokens by their name; U+FFFD where it is no text."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry written as in tokenizer.json, or None."""
        return self._tokenizer.token_to_id(token)

    def _encode(self, text: str) -> list[int]:
        _check_text(text)
        # encode() keeps the GIL for as long as it runs, which stalls an event loop beside it
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _with_bos(self, ids: list[int], add_bos: bool | None) -> list[int]:
        wanted = self.add_bos_token if add_bos is None else add_bos
        bos = self.bos_token_id
        if wanted and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if not token:
            return None
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ModelError(f"{name} {token!r} is not in the tokenizer's vocabulary")
        return token_id


def _check_text(text: str) -> None:
    """Refuse half a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; send whole characters",
            param="prompt",
        ) from error
