"""Messages to the text a model was trained on, by the template that came with the model.

Renders what transformers renders. A list of content parts is given to the template as one text, parts
on lines of their own, so that a string and a single part always give the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from headrace.errors import InvalidRequest, ModelError
from headrace.text.template_sandbox import RaisedByTemplate, RenderLimits, TemplateSandbox

_CONTINUE_MARK = "\ue000continue\ue001"
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """One model's chat template, compiled. May be used from several threads at once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        limits: RenderLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ModelError where `source` is no valid template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._render = TemplateSandbox(limits, clock).compile_source(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template cannot be parsed, line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. `add_generation_prompt` None: unless a message is continued.

        `continue_final_message` ends the text with the last message's content, character for character,
        so that the model goes on with it. `extra` are further variables for the template. Raises
        InvalidRequest where the template refuses the messages, cannot render them, or uses too much.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true: one goes on "
                "with the last message, the other starts a new one",
                param="continue_final_message",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        mark = _mark_last(plain) if continue_final_message else ""
        text = self._render_text(
            {
                **self._extra_variables(extra or {}),
                "messages": plain,
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at(text, mark) if mark else text

    def _extra_variables(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        for name in extra:
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise InvalidRequest(
                    f"chat_template_kwargs: '{name}' is set by the request itself; leave it out",
                    param="chat_template_kwargs",
                )
        return {**self._special_tokens, **extra}

    def _render_text(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._render(variables)
        except RaisedByTemplate as error:
            raise InvalidRequest(str(error), param="messages") from error
        except Exception as error:  # whatever foreign code does with foreign data
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {reason}",
                param="messages",
            ) from error


def flatten_content(content: Any, place: str = "content") -> str:
    """Return a message's content as one text. InvalidRequest naming `place` for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(
            f"{place} must be a string or a list of parts, got {type(content).__name__}",
            param="messages",
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"{place}[{index}] must be a text part, got {kind!r}; this model takes text only",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without empty fields, which templates would print as "None"; content is text."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = flatten_content(message.get("content"), f"messages[{index}].content")
    return plain


def _mark_last(messages: list[dict[str, Any]]) -> str:
    """Put a mark behind the last message's content and return it."""
    if not messages:
        raise InvalidRequest(
            "continue_final_message needs a last message to continue; messages is empty",
            param="messages",
        )
    last = messages[-1]
    mark = _CONTINUE_MARK
    while mark in last["content"]:
        mark += _CONTINUE_MARK
    last["content"] += mark
    return mark


def _cut_at(text: str, mark: str) -> str:
    place = text.rfind(mark)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not print the last message's "
            "content, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:place]
