"""The file behind `--model scripted:FILE`: which tokens a scripted model says, and how it misbehaves.

Every step of a script is a token id of its own, whose text is the piece wanted there. So the token
before decides the next one, a table of pairs is the whole model, and the same text may come twice.
Ids with the same text are told apart by marks in the vocabulary that the decoder takes away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.testing.tokenizers import CHATML_TEMPLATE, byte_tokenizer_json, tiny_special_tokens
from headrace.text.byte_level import to_characters
from headrace.text.tokenizer import Tokenizer

_MARKS = "\u2460\u2461"  # stand for 0 and 1, in front of a step's text

Piece = str | bytes | int
"""A token's text (a special token by its name), its bytes, or a copy of a token of the tokenizer."""


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON file. A piece is a text, {"bytes": "f09f"} or a token id of `tokenizer`."""

    outputs: list[str | int | dict[str, str]]
    """One token each, said from the first generated token on."""
    tokenizer: str = "byte"
    """"byte" (one token per byte), or the path of a byte-level tokenizer.json."""
    when: dict[str, list[str | int | dict[str, str]]] = msgspec.field(default_factory=dict)
    """Other outputs for prompts whose last token has this text."""
    eos: bool = True
    """Whether EOS follows the last piece; else, and after an ignored EOS, the outputs start again."""
    fail_after: int | None = None
    """After so many tokens the logits are NaN. Not for outputs of `when`."""
    step_delay_seconds: float = 0.0
    """How long each forward takes at least."""
    load_delay_seconds: float = 0.0
    """How long loading takes at least."""
    chat_template: str | None = CHATML_TEMPLATE
    special_tokens: dict[str, str] = msgspec.field(default_factory=tiny_special_tokens)
    add_bos_token: bool = False
    max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Chain:
    """What follows what: `following[t]` is the token behind t, -1 where the logits are NaN."""

    tokenizer_json: str
    vocab_size: int
    following: list[int]
    eos_token_id: int


def read_script(path: Path) -> Script:
    """Return the script in a file. ModelError where it is absent or wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise ModelError(f"scripted model: cannot read '{path}': {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ModelError(f"scripted model '{path}': {error}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"scripted model '{path}' is not JSON: {error}") from error


def write_script(path: Path, outputs: Sequence[Piece], **settings: Any) -> Path:
    """Write a script of these pieces and Script's other fields; return the path."""
    when = settings.pop("when", {})
    table = {
        "outputs": [_as_json(piece) for piece in outputs],
        "when": {text: [_as_json(piece) for piece in pieces] for text, pieces in when.items()},
        **settings,
    }
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")
    read_script(path)
    return path


def build_chain(script: Script, folder: Path) -> Chain:
    """Return the tokenizer with the script's tokens behind its own, and what follows what.

    `folder` is what a relative tokenizer path counts from.
    """
    builder = _ChainBuilder(script, folder)
    default = builder.add(script.outputs)
    others = {text: builder.add(pieces) for text, pieces in script.when.items()}
    return builder.finish(default, others)


class _ChainBuilder:
    def __init__(self, script: Script, folder: Path) -> None:
        self._script = script
        self._data = _base_tokenizer(script, folder)
        self._vocabulary: dict[str, int] = self._data["model"]["vocab"]
        self._num_base = max(self._vocabulary.values()) + 1
        self._base = Tokenizer(
            json.dumps(self._data), special_tokens=script.special_tokens, add_bos_token=False
        )
        self._num_steps = 0
        self._links: dict[int, int] = {}
        eos = self._base.token_to_id(script.special_tokens.get("eos_token", ""))
        if eos is None:
            raise ModelError(
                "scripted model: special_tokens.eos_token is not in the tokenizer; it has "
                f"{', '.join(sorted(self._special_names()))}"
            )
        self._eos = eos

    def add(self, pieces: Sequence[str | int | dict[str, str]]) -> list[int]:
        """Add a token per piece, linked in order; return the ids."""
        if not pieces and not self._script.eos:
            raise ModelError("scripted model: outputs is empty and eos is false; nothing to say")
        ids = [self._token_id(piece) for piece in pieces]
        for token_id, following in zip(ids, ids[1:], strict=False):
            self._link(token_id, following)
        return ids

    def finish(self, default: Sequence[int], others: Mapping[str, Sequence[int]]) -> Chain:
        first = default[0] if default else self._eos
        for ids in (default, *others.values()):
            if ids and ids[-1] != self._eos:
                self._link(ids[-1], self._eos if self._script.eos else ids[0])
        for text, ids in others.items():
            starts = self._base.encode(text)
            self._link(starts[-1], ids[0] if ids else self._eos)
        following = [first] * (self._num_base + self._num_steps)
        for token_id, successor in self._links.items():
            following[token_id] = successor
        self._fail(following, default)
        return Chain(json.dumps(self._data), len(following), following, self._eos)

    def _fail(self, following: list[int], default: Sequence[int]) -> None:
        fail_after = self._script.fail_after
        if fail_after is None:
            return
        if not 0 <= fail_after <= len(default):
            raise ModelError(
                f"scripted model: fail_after must be between 0 and {len(default)} (the number of "
                f"outputs), got {fail_after}"
            )
        if fail_after:
            following[default[fail_after - 1]] = -1
        else:
            following[:] = [-1 if i not in self._links else f for i, f in enumerate(following)]

    def _link(self, token_id: int, following: int) -> None:
        known = self._links.setdefault(token_id, following)
        if known != following:
            raise ModelError(
                f"scripted model: token {self._base.token_text(token_id)!r} ({token_id}) would have "
                "two successors; a special token can occur once"
            )

    def _token_id(self, piece: str | int | dict[str, str]) -> int:
        if isinstance(piece, str) and piece in self._special_names():
            return int(self._vocabulary[piece])
        if isinstance(piece, int):
            if not 0 <= piece < self._num_base:
                raise ModelError(
                    f"scripted model: token id {piece} is outside the tokenizer's "
                    f"{self._num_base} tokens"
                )
            if piece in self._base.special_ids:
                return piece
            data = self._base.token_bytes(piece)
        else:
            data = _piece_bytes(piece)
        token_id: int = self._num_base + self._num_steps
        marks = "".join(_MARKS[int(bit)] for bit in f"{self._num_steps:b}")
        self._vocabulary[marks + to_characters(data)] = token_id
        self._num_steps += 1
        return token_id

    def _special_names(self) -> set[str]:
        return {token["content"] for token in self._data["added_tokens"] if token["special"]}


def _base_tokenizer(script: Script, folder: Path) -> dict[str, Any]:
    """The tokenizer.json as data: every added token in the vocabulary too, marks taken away."""
    if script.tokenizer == "byte":
        data: dict[str, Any] = json.loads(byte_tokenizer_json())
    else:
        data = json.loads((folder / script.tokenizer).read_text(encoding="utf-8"))
    decoder = data.get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise ModelError(
            f"scripted model: tokenizer '{script.tokenizer}' has the decoder "
            f"{decoder.get('type')!r}; a script needs a byte-level one"
        )
    vocabulary = data["model"]["vocab"]
    vocabulary.update({token["content"]: token["id"] for token in data["added_tokens"]})
    data["decoder"] = {
        "type": "Sequence",
        "decoders": [
            *({"type": "Replace", "pattern": {"String": mark}, "content": ""} for mark in _MARKS),
            decoder,
        ],
    }
    return data


def _piece_bytes(piece: str | dict[str, str]) -> bytes:
    if isinstance(piece, str):
        return piece.encode()
    try:
        return bytes.fromhex(piece["bytes"])
    except (KeyError, ValueError) as error:
        raise ModelError(
            f'scripted model: {piece} is no piece; write a text, a token id or {{"bytes": "f09f"}}'
        ) from error


def _as_json(piece: Piece) -> str | int | dict[str, str]:
    return {"bytes": piece.hex()} if isinstance(piece, bytes) else piece
