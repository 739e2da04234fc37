"""The digest chain of a prompt whose tokens nobody here knows: a model that only remote servers serve.

What counts is what a chat template would render, in its order: tools first, then each message with its
role. A content given as a string or as text parts is the same content, and the order of JSON keys is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace import prefix_hash

_TOKENS_PER_BLOCK = 16


def canonical_prompt(body: Mapping[str, Any]) -> bytes:
    """Return the prompt of a chat or completions body as bytes; b"" where it has none.

    The body is whatever JSON a caller sent: nothing is taken for granted here.
    """
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = body.get("tools")
        head = _canonical(tools) + b"\n" if tools else b""
        return head + b"".join(_message(message) for message in messages)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return _canonical(prompt) if prompt else b""


def text_prefix_hashes(text: bytes, *, model: str, salt: str) -> tuple[bytes, ...]:
    """Return the digest chain of a canonical prompt, one digest for about sixteen tokens."""
    root = prefix_hash.root_digest(model_revision=f"text:{model}", salt=salt)
    return tuple(prefix_hash.text_digests(root, text))


def estimated_tokens(text: bytes) -> int:
    """Return about how many tokens a text has, at least 1."""
    return max(1, len(text) * _TOKENS_PER_BLOCK // prefix_hash.TEXT_BLOCK_BYTES)


def _message(message: Any) -> bytes:
    if not isinstance(message, dict):
        return _canonical(message) + b"\n"
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    rest = {key: value for key, value in rest.items() if value is not None}
    role = _text(message.get("role")) + b"\n"
    tail = b"\n" + _canonical(rest) if rest else b""
    return role + _content(message.get("content")) + tail + b"\n"


def _content(content: Any) -> bytes:
    if not isinstance(content, list):
        return _text(content)
    return b"".join(map(_part, content))


def _part(part: Any) -> bytes:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return _text(part["text"])
    return _canonical(part)


def _text(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _canonical(value)


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
