"""What Prometheus is told: counts and times of requests as they end, and every engine's numbers when asked.

Labels name models, endpoints, replicas, states and reasons of our own making; nothing that a caller
sends becomes one. Times are one sample per request, whatever its n, its prompts or its preemptions: TTFT
is the first token of any choice, and a request that never had a token gives none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from headrace.gateway.collectors import GatewayCollector, ReplicaCollector
from headrace.gateway.histogram import ModelHistogram
from headrace.types import RequestSummary, RequestTimings

if TYPE_CHECKING:
    from headrace.gateway.state import GatewayState

_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1, 2.5, 5,
)  # fmt: skip


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._active_counts: dict[tuple[str, str], int] = {}
        self._requests = self._counter(
            "requests", "Requests that ended, refused ones too", ("model", "endpoint", "status")
        )
        self._choices = self._counter(
            "choices", "Choices that ended, by how", ("model", "finish_reason")
        )
        self._aborts = self._counter(
            "request_aborts", "Requests whose caller left", ("model", "endpoint")
        )
        self._failures = self._counter(
            "request_failures", "Requests that the server failed", ("model", "endpoint")
        )
        self._active = Gauge(
            "headrace_requests_active",
            "Requests being served",
            ("model", "endpoint"),
            registry=self._registry,
        )
        self._ttft = self._histogram("time_to_first_token", "Arrival to first token")
        self._tpot = self._histogram(
            "time_per_output_token", "Mean time per token after the first", _TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token", "Between two pieces of news of one choice", _TOKEN_BUCKETS
        )
        self._children: dict[tuple[object, ...], Any] = {}
        """By metric and labels: the metric's own look-up costs as much as counting."""
        self._queue = self._histogram("queue", "Waiting in the engine before the first step")
        self._prefill = self._histogram("prefill", "First step to first token")
        self._decode = self._histogram("decode", "First token to last")
        self._duration = self._histogram("request", "Arrival to the end of the answer")

    def watch(self, state: GatewayState) -> None:
        """Read the parts of the gateway at every scrape. Called once, by the state that is built."""
        self._registry.register(ReplicaCollector(state.router, state.clock.now))
        self._registry.register(GatewayCollector(state))

    def request_started(self, model: str, endpoint: str) -> None:
        """A request for a known model passed validation and goes to a replica."""
        key = (model, endpoint)
        self._active_counts[key] = self._active_counts.get(key, 0) + 1
        self._child(self._active, *key).set(self._active_counts[key])

    def inter_token(self, model: str, seconds: float) -> None:
        """Seconds between two pieces of news of the same choice."""
        self._inter_token.observe(model, seconds)

    def request_finished(self, summary: RequestSummary, timings: Sequence[RequestTimings]) -> None:
        """Take the facts of a request that ended; those refused before they started have no model."""
        key = (summary.model, summary.endpoint)
        self._child(self._requests, *key, str(summary.status)).inc()
        if summary.status == 499:
            self._child(self._aborts, *key).inc()
        elif summary.status >= 500:
            self._child(self._failures, *key).inc()
        if not self._active_counts.get(key):
            return
        self._active_counts[key] -= 1
        self._child(self._active, *key).set(self._active_counts[key])
        for reason in summary.finish_reasons:
            self._child(self._choices, summary.model, reason).inc()
        self._observe_times(summary, timings)

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)

    def _observe_times(self, summary: RequestSummary, timings: Sequence[RequestTimings]) -> None:
        model = summary.model
        self._duration.observe(model, summary.duration_seconds)
        if summary.ttft_seconds is not None:
            self._ttft.observe(model, summary.ttft_seconds)
        if summary.tpot_seconds is not None:
            self._tpot.observe(model, summary.tpot_seconds)
        if timings:  # of its slowest choice: what the whole request waited for
            self._queue.observe(model, max(each.queue_seconds for each in timings))
            self._prefill.observe(model, max(each.prefill_seconds for each in timings))
            self._decode.observe(model, max(each.decode_seconds for each in timings))

    def _child(self, metric: MetricWrapperBase, *labels: str) -> Any:
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = _LATENCY_BUCKETS
    ) -> ModelHistogram:
        histogram = ModelHistogram(f"headrace_{name}_seconds", text, buckets)
        self._registry.register(histogram)
        return histogram
