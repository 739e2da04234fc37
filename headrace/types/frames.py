"""What travels between gateway and engine: msgpack frames, one tagged struct each."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import ErrorInfo
from headrace.types.card import ModelCard
from headrace.types.request import GenerationRequest

FINISH_REASONS = ("stop", "length", "abort", "error")


class TokenAlternative(msgspec.Struct, frozen=True, array_like=True):
    """One token and its log probability; `raw` is its bytes, `text` may hold U+FFFD where they are no text."""

    token_id: int
    logprob: float
    text: str
    raw: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token and the most likely ones at its place, best first."""

    chosen: TokenAlternative
    top: list[TokenAlternative]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on the engine's clock, for one finished choice."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    ttft_seconds: float | None
    """None where no token was produced."""
    num_preemptions: int


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one choice of one request: text that may be sent, and how it ended if it did."""

    request_id: str
    index: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Only in a choice's first event; None for the first prompt token."""
    finish_reason: str | None = None
    """One of FINISH_REASONS, on the last event of the choice."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    usage: Usage | None = None
    """On the last event of the choice: this choice's tokens."""
    timings: RequestTimings | None = None
    error: ErrorInfo | None = None
    """With finish_reason "error"."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now, and counters since the engine started. Counters end in _total."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    preemptions_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    policy_failures_total: int = 0


# --- gateway to engine ----------------------------------------------------------


class StartEngine(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """The first frame: this replica's part of the effective configuration, paths absolute."""

    config: dict[str, Any]


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish nothing more; close the device and leave."""


# --- engine to gateway ----------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Where the start is: a stage ("fetch", "load", "compile", "warmup") and how far, 0 to 1."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    card: ModelCard


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is in the queue; from here on it is never shed."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    request_id: str
    error: ErrorInfo


class StepEvents(msgspec.Struct, frozen=True, tag="events"):
    """All news of one step."""

    events: list[TokenEvent]
    stats: EngineStats
    step_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on."""

    message: str


ToEngine = StartEngine | Submit | Abort | Stop
FromEngine = Progress | Ready | Accepted | Refused | StepEvents | Failed
