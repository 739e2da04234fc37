"""Read-only facts that policies see. Policies never touch the mutable objects behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

set_fact = object.__setattr__
"""Changes a view: for whoever shows it, never for who looks at it."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One sequence as a scheduling policy sees it. Reused between calls: do not keep one.

    Frozen, since the built-in must decide by the same facts where a policy fails; the engine alone
    brings it up to date, through `set_fact`.
    """

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


@dataclass(frozen=True, slots=True)
class TenantService:
    """What a tenant has been served since the engine started. Frozen, as RequestView."""

    input_tokens: int = 0
    """Prompt tokens of requests that have started, once each, whatever was cached or recomputed."""
    output_tokens: int = 0
    last_active: float = 0.0
    cached_tokens: int = 0
    """Those of `input_tokens` that the prefix cache gave."""


def _unknown_step_seconds(num_prefill_tokens: int, num_sequences: int, num_kv_rows: int) -> float:
    return 0.0


def _nobody() -> Sequence[RequestView]:
    return ()


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The state of the scheduler as a policy sees it. Frozen and reused, as RequestView."""

    now: float
    token_budget: int
    decoding: int
    prefilling: int
    num_free_blocks: int
    num_blocks: int
    tenants: Mapping[str, TenantService] = field(default_factory=dict)
    step_seconds: Callable[[int, int, int], float] = _unknown_step_seconds
    """(num_prefill_tokens, num_sequences, num_kv_rows) -> predicted seconds of such a step; 0 while
    too few steps were seen."""
    running: Callable[[], Sequence[RequestView]] = _nobody
    """() -> the sequences with a slot, in the order in which they started. Costs what it lists."""


@dataclass(slots=True)
class BlockView:
    """One reusable block that holds a known prefix, as an eviction policy sees it. Reused: do not keep one."""

    block_id: int
    tenant: str = ""
    """Of the request that computed it first, as `priority`."""
    priority: int = 0
    depth: int = 0
    """Its place in its chain; 0 begins a prompt."""
    hits: int = 0
    """Requests that found it."""
    last_used: float = 0.0
    """When its last holder let go of it."""
    pinned_until: float = 0.0
    """Until when a request asked for it to be kept; 0: nobody did."""
    tenant_share: float = 0.0
    """Share of the pool's blocks, 0 to 1, that hold known prefixes of this tenant."""


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
    """What the caller says belongs together: the X-Session-ID header, else the body's `user`."""
    priority: int = 0
    num_prompt_tokens: int = 0
    prefix_hashes: tuple[bytes, ...] = ()
    """The digest chain of the prompt's full blocks, salted by tenant."""
    expected_output_tokens: int = 0
    """What its choices will probably produce in all, learnt from the tenant's requests before."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a routing policy may know of a replica; counts are from the gateway's own ledger."""

    id: str
    state: str = "ready"
    num_requests: int = 0
    """Requests in flight."""
    num_tokens: int = 0
    """Work in flight: prompt tokens still to be computed and output tokens expected."""
    block_size: int = 16
    num_blocks: int = 0
    """Of its whole KV pool; 0 where it is not known."""
    reserved_blocks: int = 0
    """Reserved by admission for the requests in flight."""
    matched_tokens: int = 0
    """Of this request's prompt, as far as it is known to have been sent there."""
    num_prefill_tokens: int = 0
    """The part of num_tokens that is prompt."""
    num_active_blocks: int = 0
    """KV blocks that the requests in flight can fill."""


@dataclass(frozen=True, slots=True)
class PromptView:
    """One prompt of a call with several."""

    num_prompt_tokens: int = 0
    expected_output_tokens: int = 0
    """Of all its choices together."""
    num_choices: int = 1
    replica_id: str = ""
    """The replica that routing proposes for it."""
    cached_tokens: int = 0
    """Prompt tokens that this replica is known to have seen."""


@dataclass(frozen=True, slots=True)
class TicketView:
    """One request at the door. At "arrival" only who asks and the size are known."""

    stage: str
    """ "arrival" or "parsed"."""
    tenant: str = ""
    num_body_bytes: int = 0
    model: str = ""
    num_prompt_tokens: int = 0
    """Of all prompts together."""
    max_output_tokens: int = 0
    """Of all choices together; what is expected where the caller sets no bound."""
    num_choices: int = 1
    replica_id: str = ""
    """The replica that routing proposes for the first prompt."""
    organization: str = ""
    priority: int = 0
    """Lower runs first."""
    cached_tokens: int = 0
    """Prompt tokens that the proposed replica is known to have seen."""
    expected_output_tokens: int = 0
    """Of all choices together, learnt per tenant; max_output_tokens while nothing is known."""
    lane: str = ""
    """The lane the ticket waits in and heads; "" for one that does not wait."""
    prompts: tuple[PromptView, ...] = ()
    """Of a call with several, each by itself; empty for a call with one, which the other fields describe."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """The tickets that wait in one lane, each counted with all its choices and tokens."""

    name: str
    num_requests: int
    num_tokens: int
    """Prompt tokens and the output tokens expected."""


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The load an admission policy judges against."""

    replicas: tuple[ReplicaView, ...] = ()
    """Of the ticket's model; all of them while the model is not known."""
    queued_requests: int = 0
    queued_tokens: int = 0
    predicted_wait_seconds: float = 0.0
    """For a ticket behind all that wait now; 0 while no rate is known."""
    lanes: tuple[LaneView, ...] = ()
    tokens_per_second: float = 0.0
    """At which requests of the ticket's model have lately given back what they held; 0: not known."""


@dataclass(frozen=True, slots=True)
class Charge:
    """An amount taken from a limit: a rate when `window_seconds` is set, else what is held until the end."""

    key: str
    amount: int
    limit: int
    """Per window; or held at once."""
    window_seconds: float | None = None
    burst: int | None = None
    """The size of a rate's bucket: how much may be taken at once after a pause; None: `limit`."""
    unit: str = "requests"
    """ "requests", "tokens" or "blocks". A rate in tokens is settled to the tokens a request really used."""
    replica_id: str = ""
    """Set: KV blocks of this replica, reserved in the gateway's own ledger; else shared by all gateways."""
    prompt_index: int = 0
    """Of a call with several, the prompt that KV blocks are for: they go where it goes."""

    @property
    def capacity(self) -> int:
        """The most that can be taken at once."""
        return self.limit if self.burst is None else self.burst


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
    """For people: what, the value, the bound and the remedy."""
    code: str = "policy"
    """For machines, and a label of metrics: a word of the policy's own, never of a caller's."""
