"""What became of every request, column by column, and how full the cluster was on the way."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from headrace.simulator.trace import Trace

UNKNOWN = math.nan


@dataclass(slots=True)
class Moment:
    """How full the cluster was at a time."""

    at: float
    num_waiting: int
    """In the engines' queues and at the door."""
    num_running: int
    kv_share: float
    """Of all blocks, those in use."""


@dataclass(slots=True)
class Outcomes:
    """One row per request of the trace, in its order. Times in seconds from the trace's start."""

    trace: Trace
    first_token_at: array[float] = field(init=False)
    """NaN: there was none."""
    end_at: array[float] = field(init=False)
    cached_tokens: array[int] = field(init=False)
    preemptions: array[int] = field(init=False)
    refusals: dict[int, str] = field(default_factory=dict)
    """Row to reason, of requests that were not let in."""
    moments: list[Moment] = field(default_factory=list)
    steps_total: int = 0
    step_seconds_total: float = 0.0
    """What the steps of all replicas took, added up; those that computed prompt tokens apart below."""
    prefill_step_seconds_total: float = 0.0
    policy_failures: list[str] = field(default_factory=list)
    """Of each policy that failed: which, how often, and the last reason."""

    def __post_init__(self) -> None:
        count = len(self.trace.requests)
        self.first_token_at = array("d", [UNKNOWN]) * count
        self.end_at = array("d", [UNKNOWN]) * count
        self.cached_tokens = array("q", [0]) * count
        self.preemptions = array("q", [0]) * count
