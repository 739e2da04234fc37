"""What every endpoint is given: the parts of one running gateway, built once by the server.

Nothing here is written to after construction; whatever changes (counts, replicas, tickets) changes
inside the object that owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.gateway.admission import AdmissionGate
from headrace.gateway.auth import Authenticator
from headrace.gateway.lifecycle import Lifecycle
from headrace.gateway.observers import Observers
from headrace.gateway.text_assets import TextAssets
from headrace.interfaces import Clock
from headrace.types import RequestSummary, RequestTimings

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.gateway.router import Router
    from headrace.gateway.tracing import Tracing


class RequestMetrics(Protocol):
    """What the endpoints tell the metrics; all calls come from the event loop."""

    def watch(self, state: GatewayState) -> None:
        """Read the parts of the gateway whenever the page is rendered. Called once."""
        ...

    def request_started(self, model: str, endpoint: str) -> None:
        """A request for a known model passed validation and goes to a replica."""
        ...

    def inter_token(self, model: str, seconds: float) -> None:
        """Seconds between two pieces of news of the same choice."""
        ...

    def request_finished(self, summary: RequestSummary, timings: Sequence[RequestTimings]) -> None:
        """Told exactly once for every request, refused ones too (their model may be "").

        `timings` has one entry per finished choice. TTFT is one sample per request: the first
        token of any of its choices; none where there was no token.
        """
        ...

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the HTTP surface that are not worth a key in the YAML."""

    max_json_depth: int = 64
    max_prompts: int = 128
    """Prompts in one completions call."""
    max_choices: int = 256
    """Prompts times n in one call."""
    max_prompt_logprobs: int = 1 << 17
    """Prompt tokens times n whose log probabilities one call gets: each choice repeats its prompt's."""
    retry_after_starting_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The parts of one gateway."""

    config: Config
    router: Router
    metrics: RequestMetrics
    clock: Clock
    observers: Observers = field(default_factory=Observers)
    admission: AdmissionGate = field(default_factory=AdmissionGate)
    authenticator: Authenticator = field(default_factory=Authenticator)
    limits: Limits = field(default_factory=Limits)
    texts: TextAssets = field(default_factory=TextAssets)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    tracing: Tracing | None = None
    """None where no spans are recorded."""
    wall_clock: Callable[[], float] = time.time
    """Unix seconds, for `created` fields only."""

    def __post_init__(self) -> None:
        self.metrics.watch(self)
