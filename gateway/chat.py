"""POST /v1/chat/completions: messages become one prompt through the model's template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.errors import InvalidRequest, shown
from headrace.gateway.answer import ChoicePlace
from headrace.gateway.call import Call, Caller, TargetModel, build_requests
from headrace.gateway.json_body import check_depth
from headrace.gateway.logprobs import chat_logprobs
from headrace.gateway.messages import template_messages
from headrace.gateway.openai_schema import ChatBody, TokenizeBody
from headrace.gateway.sampling import TokenRule, build_sampling, check_common
from headrace.gateway.state import Limits
from headrace.gateway.text_assets import ModelText
from headrace.types import TokenEvent
from headrace.types.request import MAX_TOP_LOGPROBS


def build_chat_call(body: ChatBody, caller: Caller, target: TargetModel, limits: Limits) -> Call:
    """Return the call. Renders and tokenizes, so it belongs on a text thread."""
    check_common(body)
    _check_supported(body)
    sampling = build_sampling(body, target.card, logprobs=_logprobs(body), prompt_logprobs=None)
    token_ids = chat_token_ids(body, target.text, limits)
    if body.max_completion_tokens is not None:
        rule = TokenRule(body.max_completion_tokens, "max_completion_tokens", None)
    else:
        rule = TokenRule(body.max_tokens, "max_tokens", None)
    return Call(
        card=target.card,
        requests=build_requests(body, caller, target.card, [token_ids], sampling, rule),
        format=ChatFormat(with_logprobs=bool(body.logprobs)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        session=caller.session_of(body),
    )


def _check_supported(body: ChatBody) -> None:
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: tool calls are not supported yet; leave {name} out or send []", param=name
            )
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise InvalidRequest(
                f"{name} must be 'none' or 'auto', because there are no tools to call", param=name
            )
    if body.chat_template is not None:
        raise InvalidRequest(
            "chat_template cannot be sent with a request: the model's own is used",
            param="chat_template",
        )


def _logprobs(body: ChatBody) -> int | None:
    wanted = body.top_logprobs
    if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {shown(wanted)}",
            param="top_logprobs",
        )
    if not body.logprobs:
        if wanted:
            raise InvalidRequest(
                f"top_logprobs ({wanted}) needs logprobs: true", param="top_logprobs"
            )
        return None
    return wanted or 0


def chat_token_ids(body: ChatBody | TokenizeBody, text: ModelText, limits: Limits) -> list[int]:
    """Return the tokens of the rendered chat. Slow: for a text thread."""
    messages = template_messages(body.messages, max_depth=limits.max_json_depth)
    continued = bool(body.continue_final_message)
    if continued and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, got role "
            f"'{messages[-1]['role']}'",
            param="continue_final_message",
        )
    extra = body.chat_template_kwargs or {}
    check_depth("chat_template_kwargs", extra, limits.max_json_depth)
    if text.template is None:
        raise InvalidRequest(text.template_problem, param="messages")
    rendered = text.template.render(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=continued,
        extra=extra,
    )
    return text.tokenizer.encode_rendered(rendered)


@dataclass(slots=True)
class ChatFormat:
    """The choices of a chat answer."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    with_logprobs: bool
    _opened: set[int] = field(default_factory=set)

    def piece(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any] | None:
        opens = place.index not in self._opened
        if not (opens or event.text or event.logprobs):
            return None
        delta: dict[str, Any] = {"content": event.text}
        if opens:
            self._opened.add(place.index)
            delta = {"role": "assistant", **delta}
        return {
            "index": place.index,
            "delta": delta,
            "logprobs": self._logprobs(event),
            "finish_reason": None,
        }

    def closing(self, place: ChoicePlace, finish_reason: str) -> dict[str, Any]:
        return {
            "index": place.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def whole(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any]:
        return {
            "index": place.index,
            "message": {"role": "assistant", "content": event.text, "refusal": None},
            "logprobs": self._logprobs(event),
            "finish_reason": event.finish_reason,
        }

    def _logprobs(self, event: TokenEvent) -> dict[str, Any] | None:
        return chat_logprobs(event.logprobs or ()) if self.with_logprobs else None
