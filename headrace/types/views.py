"""Read-only facts that policies see. Policies never touch the mutable objects behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestView:
    """One sequence as a scheduling policy sees it. Reused between calls: do not keep one."""

    request_id: str
    choice: int = 0
    tenant: str = ""
    priority: int = 0
    arrival_time: float = 0.0
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """What the prefix cache gave or would give now."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_blocks: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class TenantService:
    """What a tenant has been served since the engine started."""

    input_tokens: int = 0
    output_tokens: int = 0
    last_active: float = 0.0


def _unknown_step_seconds(num_prefill_tokens: int, num_sequences: int, num_kv_rows: int) -> float:
    return 0.0


@dataclass(slots=True)
class SchedulerView:
    """The state of the scheduler as a policy sees it."""

    now: float
    token_budget: int
    decoding: int
    prefilling: int
    num_free_blocks: int
    num_blocks: int
    tenants: Mapping[str, TenantService] = field(default_factory=dict)
    step_seconds: Callable[[int, int, int], float] = _unknown_step_seconds
    """(num_prefill_tokens, num_sequences, num_kv_rows) -> predicted seconds of such a step."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Who got how many tokens in one step, and who finished."""

    now: float
    step_seconds: float
    tokens: Mapping[str, int]
    finished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a routing policy may know of a request."""

    model: str
    tenant: str = ""
    session: str = ""
    priority: int = 0
    num_prompt_tokens: int = 0
    prefix_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a routing policy may know of a replica; counts are from the gateway's own ledger."""

    id: str
    state: str = "ready"
    num_requests: int = 0
    num_tokens: int = 0
    block_size: int = 16
    num_blocks: int = 0
    reserved_blocks: int = 0
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TicketView:
    """One request at the door. At "arrival" only tenant and size are known."""

    stage: str
    """ "arrival" or "parsed"."""
    tenant: str = ""
    num_body_bytes: int = 0
    model: str = ""
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0
    num_choices: int = 1
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The load an admission policy judges against."""

    replicas: tuple[ReplicaView, ...] = ()
    queued_requests: int = 0
    queued_tokens: int = 0
    predicted_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Charge:
    """An amount taken from a limit: a rate when `window_seconds` is set, else concurrency."""

    key: str
    amount: int
    limit: int
    window_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    charges: tuple[Charge, ...] = ()


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait in `lane`, until a time on the gateway's clock at most."""

    lane: str
    until: float


@dataclass(frozen=True, slots=True)
class Reject:
    """fault "caller" is a 429, "server" a 503."""

    fault: str
    retry_after_seconds: float
    reason: str
