"""Reads a request body: bounded, strict JSON, and errors that name field, value and what is allowed.

msgspec refuses NaN, Infinity and numbers out of range while it parses, so no such value gets past
this module; nesting is bounded because free-form parts travel on into templates.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from headrace.errors import InvalidRequest, RequestAborted, shown
from headrace.gateway.errors import BodyTooLarge, EncodedBody

T = TypeVar("T")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$?(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]")
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_SHOWN_CHARACTERS = 60


def content_length(scope: Scope) -> int:
    """Return the announced size of the body; 0 where there is none or it makes no sense."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def read_body(scope: Scope, receive: Receive, max_body_bytes: int) -> bytes:
    """Return the whole body, or raise EncodedBody, BodyTooLarge or RequestAborted."""
    _check_encoding(scope)
    if content_length(scope) > max_body_bytes:
        raise _too_large(content_length(scope), max_body_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client left while it sent the body")
        part = message.get("body", b"")
        size += len(part)
        if size > max_body_bytes:
            raise _too_large(size, max_body_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_encoding(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            encoding = shown(value.decode("latin-1"))
            raise EncodedBody(
                f"the body has the content encoding '{encoding}'; send it as plain JSON, without one"
            )


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes or more; at most {limit} are read")


def decode_body(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the typed body, or raise InvalidRequest that names the field, the value and the rule."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _describe(str(error), raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error}. NaN and Infinity are not JSON; text must be UTF-8"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def check_depth(name: str, value: object, max_depth: int) -> None:
    """Raise InvalidRequest where a free-form value is nested deeper than `max_depth`."""
    level = [value]
    for _ in range(max_depth):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise InvalidRequest(f"{name} is nested deeper than {max_depth} levels", param=name)


def _describe(message: str, raw: bytes) -> InvalidRequest:
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    param = path.removeprefix(".").replace("[...]", "") or None
    shown = _shown(raw, path)
    expected = re.match(r"Expected `(?P<types>[^`]+)`, got `(?P<got>[^`]+)`$", what)
    if expected is None:
        text = what[:1].lower() + what[1:]
        return InvalidRequest(
            f"{param or 'the body'}: {text}{shown and f', got {shown}'}", param=param
        )
    types = " or ".join(
        _WORDS.get(name, name) for name in expected["types"].split(" | ") if name != "null"
    )
    got = shown or _WORDS.get(expected["got"], expected["got"])
    return InvalidRequest(f"{param or 'the body'} must be {types}, got {got}", param=param)


def _shown(raw: bytes, path: str) -> str:
    """Return the offending value as JSON, shortened; empty where it cannot be found."""
    try:
        value: Any = msgspec.json.decode(raw)
        for step in _STEP.finditer(path):
            value = value[step["name"] if step["name"] is not None else int(step["index"])]
        shown = msgspec.json.encode(value).decode()
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
