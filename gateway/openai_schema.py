"""The bodies of the OpenAI API as typed structs: an explicit null is the same as an absent field.

Every field is optional here, and fields nobody knows are skipped by the decoder; what is missing,
out of range or not built yet is refused later, where the message can say why.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ServiceObjective(msgspec.Struct, frozen=True):
    """How soon the first token and each later one are wanted, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    user: Any = None
    cache_salt: str | None = None
    cache_ttl: float | None = None
    slo: ServiceObjective | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str | None = None
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


CHAT_DECODER = msgspec.json.Decoder(ChatBody)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionBody)
TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeBody)
