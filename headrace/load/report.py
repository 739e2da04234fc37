"""The figures of a run, with the formulas of `vllm bench serve`.

TTFT is first text minus due; E2E is end of text minus due; TPOT is (E2E - TTFT) / (tokens - 1); ITL are
the gaps between events with text, all requests pooled. Percentiles interpolate linearly. Goodput counts
requests per second that meet every limit of the service level. Tokens are the server's own count
(`usage`), so that servers which put several tokens into one event are measured fairly; a server that
sends no usage is taken to send a token per event. A failed request enters none of the figures but the
count of failures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.errors import ConfigError
from headrace.load.plan import LoadPlan
from headrace.types.units import parse_duration

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
FRACTIONS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class RequestOutcome:
    """One request: seconds from when it was due, or why it failed."""

    start_seconds: float = 0.0
    """When it was due, from the start of the run."""
    late_seconds: float = 0.0
    """How much later it was sent."""
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None
    itl_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits, in seconds, that a good request keeps."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str, option: str = "--slo") -> Self:
        """Return what "ttft=500ms,tpot=50ms" says. ConfigError where it names no limit or no duration."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                if name not in ("ttft", "tpot", "e2e"):
                    raise ValueError("one of ttft=.., tpot=.., e2e=..")
                limits[name] = parse_duration(value)
            except ValueError as error:
                raise ConfigError(
                    f"{option} {text!r}: {part.strip()!r} is not {error}. "
                    "Write it as ttft=500ms,tpot=50ms,e2e=10s; each may be left out"
                ) from None
        return cls(**limits)

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        """Whether a request succeeded inside every limit; one token has no TPOT and keeps any."""
        if outcome.error is not None:
            return False
        pairs = (
            (self.ttft, outcome.ttft_seconds),
            (self.tpot, outcome.tpot_seconds),
            (self.e2e, outcome.e2e_seconds),
        )
        return all(limit is None or (seconds or 0.0) <= limit for limit, seconds in pairs)

    def __str__(self) -> str:
        limits = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ",".join(f"{name}={1e3 * v:g}ms" for name, v in limits if v is not None)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile of sorted, non-empty `values`, interpolated linearly."""
    place = fraction * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of one run."""

    plan: LoadPlan
    wall_seconds: float
    outcomes: Sequence[RequestOutcome] = field(repr=False)
    started_at: float = 0.0
    """When the run began, by time.monotonic."""

    @property
    def succeeded(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    @property
    def requests_per_second(self) -> float:
        return len(self.succeeded) / self.wall_seconds

    @property
    def output_tokens_per_second(self) -> float:
        return sum(outcome.output_tokens for outcome in self.succeeded) / self.wall_seconds

    @property
    def total_tokens_per_second(self) -> float:
        tokens = sum(outcome.output_tokens + outcome.prompt_tokens for outcome in self.succeeded)
        return tokens / self.wall_seconds

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that the server says it had in its prefix cache."""
        prompt = sum(outcome.prompt_tokens for outcome in self.succeeded)
        return sum(outcome.cached_tokens for outcome in self.succeeded) / prompt if prompt else 0.0

    def goodput(self, level: ServiceLevel) -> float:
        """Return requests per second that keep every limit."""
        return self._num_good(level) / self.wall_seconds

    def _num_good(self, level: ServiceLevel) -> int:
        return sum(map(level.is_met_by, self.outcomes))

    def seconds(self, latency: str) -> list[float]:
        """Return all values of "ttft", "tpot", "itl" or "e2e", sorted."""
        if latency == "itl":
            return sorted(gap for outcome in self.succeeded for gap in outcome.itl_seconds)
        values = (getattr(outcome, f"{latency}_seconds") for outcome in self.succeeded)
        return sorted(value for value in values if value is not None)

    def percentile(self, latency: str, fraction: float) -> float | None:
        """Return a quantile of a latency in seconds; None where no request succeeded."""
        values = self.seconds(latency)
        return percentile(values, fraction) if values else None

    def latency(self, latency: str) -> dict[str, float] | None:
        """Return mean, std, p50, p90, p95 and p99 in seconds; None where no request succeeded."""
        values = self.seconds(latency)
        if not values:
            return None
        found = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
        return found | {name: percentile(values, at) for name, at in FRACTIONS.items()}

    def as_dict(self, level: ServiceLevel | None = None) -> dict[str, Any]:
        """Return the run as plain data: what was asked, the figures, and a row per request."""
        plan = self.plan
        is_open = plan.request_rate is not None
        row: dict[str, Any] = {
            "load": {
                "endpoint": plan.endpoint,
                "model": plan.model,
                "concurrency": None if is_open else plan.concurrency,
                "request_rate": plan.request_rate,
                "burstiness": f"{plan.burstiness:g}" if is_open else None,
                "max_concurrency": plan.max_concurrency if is_open else None,
                "prompt_tokens": str(plan.prompt_tokens),
                "output_tokens": str(plan.output_tokens),
                "shared_prefix_tokens": plan.shared_prefix_tokens,
                "shared_prefix_share": plan.shared_prefix_share,
                "seed": plan.seed,
            },
            "requests": len(self.outcomes),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "wall_seconds": self.wall_seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
            "cached_share": self.cached_share,
            "late_seconds_max": max((o.late_seconds for o in self.outcomes), default=0.0),
        }
        if level is not None:
            row["slo"] = str(level)
            row["goodput_requests_per_second"] = self.goodput(level)
            row["slo_share"] = self._num_good(level) / max(1, len(self.outcomes))
        row["seconds"] = {latency: self.latency(latency) for latency in LATENCIES}
        names = ("start", "late", "ttft", "tpot", "e2e")
        row["outcomes"] = [
            {f"{name}_seconds": getattr(outcome, f"{name}_seconds") for name in names}
            | {
                "prompt_tokens": outcome.prompt_tokens,
                "cached_tokens": outcome.cached_tokens,
                "output_tokens": outcome.output_tokens,
                "error": outcome.error,
            }
            for outcome in self.outcomes
        ]
        return row
