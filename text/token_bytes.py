"""What bytes a vocabulary entry stands for, read from the `decoder` of a tokenizer.json.

Decoding by bytes rather than by calling the tokenizer makes incremental decoding exact and of the
same cost for every token: text is the UTF-8 reading of the tokens' bytes in a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelError
from headrace.text.byte_level import to_bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip and sequences of them"


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How entries of one vocabulary turn into bytes."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_prefix: str = ""
    """A text decoded as a whole loses this start: the tokenizer put it there when encoding."""

    def bytes_of(self, token: str, added: bool) -> bytes:
        """Return the bytes of a vocabulary entry; `added` tokens stand for their own text."""
        if self.byte_level and added:
            return token.encode()
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_level:
            data = to_bytes(token)
            return token.encode() if data is None else data
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def byte_rule(decoder: Mapping[str, Any] | None) -> ByteRule:
    """Return the rule a tokenizer.json's `decoder` describes. ModelError where it is another kind."""
    if decoder is None:
        raise ModelError(f"tokenizer.json has no decoder; supported are {_KNOWN}")
    steps = _flatten(decoder)
    kinds = {str(step.get("type")) for step in steps}
    replacements: list[tuple[str, str]] = []
    strip_prefix = ""
    for step in steps:
        kind = str(step.get("type"))
        if kind == "Replace":
            replacements.append(_replacement(step))
        elif kind == "Metaspace":
            replacements.append((str(step.get("replacement", "▁")), " "))
            strip_prefix = " " if _prepends_space(step) else strip_prefix
        elif kind == "Strip":
            strip_prefix = str(step.get("content", " ")) * int(step.get("start", 0))
        elif kind not in ("ByteFallback", "ByteLevel", "Fuse"):
            raise ModelError(f"tokenizer.json: decoder {kind!r} is not supported; known: {_KNOWN}")
    return ByteRule(
        byte_level="ByteLevel" in kinds,
        replacements=tuple(replacements),
        byte_fallback="ByteFallback" in kinds,
        strip_prefix=strip_prefix,
    )


def _flatten(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", ()) for step in _flatten(part)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step.get("pattern")
    if isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str):
        return pattern["String"], str(step.get("content", ""))
    raise ModelError(
        f"tokenizer.json: decoder Replace has the pattern {pattern!r}; only a plain string works"
    )


def _prepends_space(step: Mapping[str, Any]) -> bool:
    if "prepend_scheme" in step:
        return step["prepend_scheme"] in ("first", "always")
    return bool(step.get("add_prefix_space", True))
