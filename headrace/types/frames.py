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
    """Only in a request's first event, whichever choice that is of; None for the first prompt token."""
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
    prefill_step_seconds_total: float = 0.0
    """Of steps that computed prompt tokens, decodes beside them included."""
    policy_failures_total: int = 0
    """Of the scheduling policy, as the two below."""
    policy_calls_total: int = 0
    policy_seconds_total: float = 0.0
    eviction_failures_total: int = 0
    eviction_calls_total: int = 0
    eviction_seconds_total: float = 0.0
    step_time_coefficients: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """The learnt step-time formula: seconds per step, prompt token, sequence and KV row."""
    step_time_error: float = 1.0
    """Mean absolute error of its recent predictions, over the mean step."""


class PolicyChoice(msgspec.Struct, frozen=True):
    """What was asked for: a registered name or a script, and its options."""

    use: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of one kind in force, and how it fares. Counters last as long as the process."""

    kind: str
    name: str
    use: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    strikes: int = 0
    is_benched: bool = False
    """The built-in decides until another policy is swapped in."""
    failures_total: int = 0
    calls_total: int = 0
    seconds_total: float = 0.0
    last_failure: str = ""


# --- gateway to engine ----------------------------------------------------------


class StartEngine(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """The first frame: this replica's part of the effective configuration, paths absolute."""

    config: dict[str, Any]
    benched: dict[str, str] = msgspec.field(default_factory=dict)
    """Kinds whose policy ended the process before this one, and how: the built-in decides for them."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class PreparePolicy(msgspec.Struct, frozen=True, tag="prepare_policy"):
    """Load and check a policy beside the one in force; answered by PolicyPrepared."""

    swap_id: int
    kind: str
    choice: PolicyChoice


class CommitPolicy(msgspec.Struct, frozen=True, tag="commit_policy"):
    """Use the prepared policy from the next step on; answered by PolicyReport."""

    swap_id: int


class DropPolicy(msgspec.Struct, frozen=True, tag="drop_policy"):
    """Forget a prepared policy: another replica refused it."""

    swap_id: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Say that you live."""


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


class PolicyPrepared(msgspec.Struct, frozen=True, tag="policy_prepared"):
    """`error` says why the policy was refused; "" where it is ready."""

    swap_id: int
    error: str = ""


class PolicyReport(msgspec.Struct, frozen=True, tag="policies"):
    """The policies in force: sent at the start, after a swap and after a failure."""

    states: list[PolicyState]
    swap_id: int = 0
    """The swap that this follows; 0: none."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The process lives. Its engine has been inside one step for so long; 0 between two."""

    busy_seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on."""

    message: str
    told_clients: str = ""
    """The part of the reason that is for those whose requests it ends."""


ToEngine = StartEngine | Submit | Abort | PreparePolicy | CommitPolicy | DropPolicy | Ping | Stop
FromEngine = (
    Progress
    | Ready
    | Accepted
    | Refused
    | StepEvents
    | PolicyPrepared
    | PolicyReport
    | Pong
    | Failed
)
