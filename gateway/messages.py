"""Chat messages as clients send them, checked and turned into what templates expect.

Templates of small models know strings only, so text parts are joined (by a newline), and `developer` is
the same as `system`. Names of people are left out: no template of ours reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.gateway.json_body import check_depth
from headrace.gateway.openai_schema import ContentPart, Message

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(
    messages: Sequence[Message] | None, *, max_depth: int = 64
) -> list[dict[str, Any]]:
    """Return the messages as a template takes them, or raise InvalidRequest with the bad one's index."""
    if not messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    return [
        _template_message(f"messages[{index}]", message, max_depth)
        for index, message in enumerate(messages)
    ]


def _template_message(where: str, message: Message, max_depth: int) -> dict[str, Any]:
    if message.role not in _ROLES:
        given = "it is missing" if message.role is None else f"got '{message.role[:60]}'"
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}; {given}", param=f"{where}.role"
        )
    calls_something = bool(message.tool_calls) or message.function_call is not None
    content = _text(f"{where}.content", message.content)
    if content is None:
        if message.role != "assistant" or not calls_something:
            raise InvalidRequest(
                f"{where}.content is missing: only an assistant message with tool_calls may have none",
                param=f"{where}.content",
            )
        content = ""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls and role == "assistant":
        check_depth(f"{where}.tool_calls", message.tool_calls, max_depth)
        result["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{index}]", call)
            for index, call in enumerate(message.tool_calls)
        ]
    if role in ("tool", "function"):
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            result["name"] = message.name
    return result


def _text(where: str, content: str | list[ContentPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{where} must have at least one part", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            given = "it is missing" if part.type is None else f"got '{part.type[:60]}'"
            raise InvalidRequest(
                f"{where}[{index}].type must be 'text': other parts are not supported; {given}",
                param=f"{where}[{index}].type",
            )
        if part.text is None:
            raise InvalidRequest(
                f"{where}[{index}].text is missing", param=f"{where}[{index}].text"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """Return the call with its arguments as an object, which is what templates print."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ..., '
            f'"arguments": ...}}}}',
            param=where,
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            check_depth(f"{where}.function.arguments", parsed, 64)
            arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}
