"""Turns the sampling fields of a body into SamplingParams: given, else the model's, else neutral.

The room rule is here too, the same for both endpoints: what is asked for explicitly must fit the
context next to the prompt, what is left open is cut to the room there is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from headrace.errors import ContextLengthExceeded, InvalidRequest, shown
from headrace.gateway.openai_schema import GenerationBody
from headrace.types import ModelCard, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_PRIORITY = 2**31 - 1
MAX_STOP_CHARACTERS = 4096

_TOKEN_KEY = re.compile(r"-?[0-9]{1,19}")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_UNSUPPORTED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def build_sampling(
    body: GenerationBody,
    card: ModelCard,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling of one call, all but max_tokens, which needs the prompt."""
    values: dict[str, Any] = {}
    for name in (*_FLOATS, "top_k"):
        given = getattr(body, name)
        value = given if given is not None else card.default_sampling.get(name)
        if value is not None:
            values[name] = value
    if values.get("top_k", 0) >= card.vocab_size:
        values["top_k"] = 0
    if body.min_tokens is not None:
        values["min_tokens"] = body.min_tokens
    if body.n is not None:
        values["n"] = body.n
    return SamplingParams(
        **values,
        logit_bias=_logit_bias(body.logit_bias),
        stop=_stop(body.stop),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        max_tokens=None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(given: dict[str, Any] | None) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not _TOKEN_KEY.fullmatch(key):
            raise InvalidRequest(
                "logit_bias: keys must be token ids as decimal strings of at most 19 digits, "
                f"got '{key[:60]}'",
                param="logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(
                f"logit_bias: the bias of token {key[:60]} must be a number between -100 and 100",
                param="logit_bias",
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(
                f"logit_bias: the bias of token {key[:60]} must be between -100 and 100, "
                f"got {shown(value)}",
                param="logit_bias",
            )
        biases[int(key)] = float(value)
    return biases


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    for text in stop:
        if len(text) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop: a string may have at most {MAX_STOP_CHARACTERS} characters, got {len(text)}",
                param="stop",
            )
    return stop


def check_common(body: GenerationBody) -> None:
    """Refuse what both endpoints refuse: what is not built yet, and fields out of range."""
    _check_response_format(body.response_format)
    for name in _UNSUPPORTED:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not supported: remove it", param=name)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream: true; remove it or stream",
            param="stream_options",
        )
    if body.priority is not None and not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got "
            f"{shown(body.priority)}",
            param="priority",
        )
    if body.cache_ttl is not None and not 0 < body.cache_ttl < math.inf:
        raise InvalidRequest(
            f"cache_ttl must be above 0 seconds, got {body.cache_ttl:g}", param="cache_ttl"
        )
    if body.slo is not None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(body.slo, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidRequest(
                    f"slo.{name} must be above 0 milliseconds, got {value:g}", param=f"slo.{name}"
                )


def _check_response_format(given: Any) -> None:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind is not None and (not isinstance(given, dict) or kind != "text"):
        raise InvalidRequest(
            'response_format must be {"type": "text"}: other formats are not supported; remove it',
            param="response_format",
        )


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How many tokens a call may get: what it asks for, under which name, and else what."""

    asked: int | None
    param: str
    default: int | None
    """None: the room left in the context."""
    allows_none: bool = False
    """0 is legal: the prompt is only scored."""


def resolve_max_tokens(rule: TokenRule, *, num_prompt_tokens: int, card: ModelCard) -> int:
    """Return how many tokens this prompt may get, or raise ContextLengthExceeded with the arithmetic."""
    context = card.max_model_len
    room = context - num_prompt_tokens
    asked, param = rule.asked, rule.param
    if room <= 0:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; model '{card.name}' has a context of "
            f"{context}, and at least one must be left to generate: shorten the prompt by "
            f"{1 - room} tokens",
            param="messages" if rule.default is None else "prompt",
        )
    if asked is None:
        return room if rule.default is None else min(rule.default, room)
    if asked < 0 or (asked == 0 and not rule.allows_none):
        hint = "" if asked else "; 0 is allowed only on completions with echo and logprobs"
        raise InvalidRequest(f"{param} must be at least 1, got {shown(asked)}{hint}", param=param)
    if asked > room:
        raise ContextLengthExceeded(
            f"{param} asks for {shown(asked)} tokens after a prompt of {num_prompt_tokens}, but model "
            f"'{card.name}' has a context of {context}: ask for at most {room}, or leave {param} out",
            param=param,
        )
    return asked
