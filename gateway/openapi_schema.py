"""What the OpenAPI document says of bodies beyond their types: bounds and what is needed; and the answers.

The answers are written down here as structs because the gateway builds them as plain dictionaries; the
document's own tests hold real answers against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

_PENALTY = {"minimum": -2, "maximum": 2}
_COMMON: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 0, "maximum": 2**63 - 1},
    "temperature": {"minimum": 0, "maximum": 1e6},
    "top_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**63 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 1e6},
    "min_tokens": {"minimum": 0, "maximum": 2**63 - 1},
    "priority": {"minimum": -(2**31), "maximum": 2**31},
}
BOUNDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ChatBody": {
        **_COMMON,
        "max_tokens": {"minimum": 1, "maximum": 2**63 - 1},
        "max_completion_tokens": {"minimum": 1, "maximum": 2**63 - 1},
        "top_logprobs": {"minimum": 0, "maximum": 20},
        "messages": {"minItems": 1},
    },
    "CompletionBody": {**_COMMON, "logprobs": {"minimum": 0, "maximum": 5}},
}
"""Keywords that a field's schema gets, where it is given at all. Beyond them some combinations are refused."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "ChatBody": ("messages",),
    "CompletionBody": ("prompt",),
    "DetokenizeBody": ("tokens",),
    "Message": ("role",),
    "ContentPart": ("type", "text"),
}
"""Fields that must be there and not null."""

ENUMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Message": {"role": ("system", "developer", "user", "assistant", "tool", "function")},
    "ContentPart": {"type": ("text",)},
}


class ErrorDetail(msgspec.Struct):
    """What went wrong. A server that is starting adds `model`, `state`, `stage` and `progress`."""

    message: str
    type: str
    param: str | None
    code: str
    reason: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageTotals(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageTotals
    system_fingerprint: str | None = None


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class TextCompletion(msgspec.Struct):
    """The answer of /v1/completions in one piece."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageTotals
    system_fingerprint: str | None = None


class ModelObject(msgspec.Struct):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class HealthAnswer(msgspec.Struct):
    status: Literal["ok"]


class ReadyAnswer(msgspec.Struct):
    ready: bool
    models: dict[str, Any]
