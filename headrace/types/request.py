"""What a request asks for. Everything here can only be built valid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidRequest, shown

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when generation ends.

    Order of operations for a row of logits: logit_bias, penalties, temperature, top_k, top_p,
    min_p, draw. Filters are computed on the distribution after temperature. Log probabilities are
    those of the model's own distribution: before temperature, penalties, bias and filters.
    """

    temperature: float = 1.0
    """0 is greedy; at most 1e6."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 mean off."""
    top_p: float = 1.0
    """Nucleus mass in [0, 1]; 1 is off, 0 keeps only the best token."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one; in [0, 1]."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both in [-2, 2], over output tokens, as OpenAI defines them."""
    repetition_penalty: float = 1.0
    """Above 0; divides positive and multiplies negative logits of tokens seen in prompt or output."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the logits of these token ids; each in [-100, 100]."""
    max_tokens: int | None = None
    """None: the room left in the context. 0 only with prompt_logprobs."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    """None: off. k: the drawn token's log probability and those of the k most likely (0 to 20)."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    grammar: str | None = None
    """A grammar as text. No engine accepts one yet; refused at the API."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_counts(self)
        _check_stops(self)


def _bounded(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} must be between {low:g} and {high:g}, got {shown(value)}", param=name
        )


_NUMBER_BOUNDS = (
    ("temperature", 0, 1e6),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 1e6),
)


def _check_numbers(p: SamplingParams) -> None:
    for name, low, high in _NUMBER_BOUNDS:
        _bounded(name, getattr(p, name), low, high)
    if p.repetition_penalty == 0:
        raise InvalidRequest(
            "repetition_penalty must be above 0, got 0; 1 means off", param="repetition_penalty"
        )
    for token_id, bias in p.logit_bias.items():
        _bounded("logit_bias", bias, -100, 100)
        if token_id < 0:
            raise InvalidRequest(
                f"logit_bias: token id {shown(token_id)} is negative", param="logit_bias"
            )


def _check_counts(p: SamplingParams) -> None:
    if p.top_k < -1:
        raise InvalidRequest(
            f"top_k must be -1 or 0 (off) or at least 1, got {shown(p.top_k)}", param="top_k"
        )
    _bounded("n", p.n, 1, MAX_CHOICES)
    if p.max_tokens is not None:
        if p.max_tokens < 0:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {shown(p.max_tokens)}", param="max_tokens"
            )
        if p.max_tokens == 0 and p.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens: 0 is allowed only with echo and logprobs (scoring a prompt)",
                param="max_tokens",
            )
        if p.min_tokens > p.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({shown(p.min_tokens)}) must be at most max_tokens "
                f"({shown(p.max_tokens)})",
                param="min_tokens",
            )
    if p.min_tokens < 0:
        raise InvalidRequest(
            f"min_tokens must be at least 0, got {shown(p.min_tokens)}", param="min_tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None:
            _bounded(name, value, 0, MAX_TOP_LOGPROBS)
    if p.seed is not None:
        if not -(2**63) <= p.seed < 2**64:
            raise InvalidRequest(f"seed must fit 64 bits, got {shown(p.seed)}", param="seed")


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(p.stop)}", param="stop"
        )
    if any(not text for text in p.stop):
        raise InvalidRequest("stop: an empty string matches every text; remove it", param="stop")
    for token_id in p.stop_token_ids:
        if token_id < 0:
            raise InvalidRequest(
                f"stop_token_ids: token id {shown(token_id)} is negative", param="stop_token_ids"
            )


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the engine takes it: tokens, not text."""

    request_id: str
    """Unique in the system; made by the gateway, never by a client."""
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    """Lower runs first."""
    arrival_time: float = 0.0
    """Seconds on the clock of whoever made the request; the engine stamps its own on arrival."""
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
    cache_salt: str = ""
    """Mixed into every prefix-cache key: requests with different salts share nothing."""
    cache_ttl_seconds: float | None = None
    """Asks for the prompt's KV blocks to be kept so long after the request; the eviction policy weighs it."""
    context_id: str | None = None
    prefix_hashes: tuple[bytes, ...] = ()
    """Digests of the prompt's full blocks where the gateway has computed them already."""
    is_whole: bool = False
    """The answer is wanted in one piece: of each choice the engine tells the first news and the end."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        for name in ("ttft_target_seconds", "tpot_target_seconds"):
            value: Any = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} must be above 0, got {value}", param="slo")
        ttl = self.cache_ttl_seconds
        if ttl is not None and not (math.isfinite(ttl) and ttl > 0):
            raise InvalidRequest(f"cache_ttl must be above 0, got {ttl}", param="cache_ttl")


def check_token_ids(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, vocab_size: int
) -> None:
    """Raise InvalidRequest where a token id that a request names is outside the vocabulary."""
    groups = (
        ("prompt", prompt_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    )
    for param, ids in groups:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            continue
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{param}: token id {shown(token_id)} is outside the vocabulary of "
                    f"{vocab_size} tokens (0 to {vocab_size - 1})",
                    param=param,
                )
