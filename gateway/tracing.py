"""OpenTelemetry spans of finished requests: gateway, replica, and what the engine says of its own time.

The spans of a request are made when it is over, from the facts that metrics and log get too, so that
nothing of this is on the path of a token. The names are OpenTelemetry's for generative AI (`gen_ai.*`).
Only a configured endpoint imports the packages of the extra `otel`; they are told nothing of tenants, keys
or texts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.config import TelemetryConfig
from headrace.errors import ConfigError
from headrace.gateway.trace_context import TraceContext
from headrace.types import RequestSummary, RequestTimings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """One finished request."""

    trace: TraceContext
    summary: RequestSummary
    timings: Sequence[RequestTimings]
    """One per finished choice; the slowest one's are shown."""
    error_code: str | None
    replica: str
    """Where it ran last; "" where it never reached one."""


class Tracing:
    """Makes the spans and hands them to an exporter's thread. `wall_clock` gives nanoseconds."""

    def __init__(
        self,
        exporter: SpanExporter,
        config: TelemetryConfig,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class GivenIds(RandomIdGenerator):
            """Gives the next span ids that were decided before it was made; later ones are random."""

            trace_id: int | None = None
            span_id: int | None = None

            def generate_trace_id(self) -> int:
                given, self.trace_id = self.trace_id, None
                return given or super().generate_trace_id()

            def generate_span_id(self) -> int:
                given, self.span_id = self.span_id, None
                return given or super().generate_span_id()

        self.sample_ratio = config.sample_ratio
        self._ids = GivenIds()
        self._wall_clock = wall_clock
        self._exporter = exporter
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": config.service_name}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headrace.gateway")

    def request_finished(self, facts: SpanFacts) -> None:
        """Make the spans of one request; it must have been sampled. Never waits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = self._wall_clock()
        summary = facts.summary
        start = end - _nanoseconds(summary.duration_seconds)
        operation = _OPERATIONS.get(summary.endpoint, summary.endpoint)
        self._ids.trace_id = int(facts.trace.trace_id, 16)
        self._ids.span_id = int(facts.trace.span_id, 16)
        root = self._tracer.start_span(
            f"{operation} {summary.model}".strip(),
            context=_parent(facts.trace),
            kind=SpanKind.SERVER,
            attributes=_attributes(facts, operation),
            start_time=start,
        )
        if summary.status >= 500:
            root.set_status(Status(StatusCode.ERROR, facts.error_code))
        if facts.replica:
            self._replica_spans(root, facts, (start, end))
        root.end(end)

    def _replica_spans(self, root: Any, facts: SpanFacts, bounds: tuple[int, int]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        start, end = bounds
        parts = _engine_parts(facts.timings)
        begin = max(start, end - sum(length for _, length in parts)) if parts else start
        replica = self._tracer.start_span(
            f"replica {facts.replica}",
            context=set_span_in_context(root),
            kind=SpanKind.CLIENT,
            attributes={"headrace.replica": facts.replica},
            start_time=begin,
        )
        for name, length in parts:
            span = self._tracer.start_span(
                f"engine {name}", context=set_span_in_context(replica), start_time=begin
            )
            begin = min(begin + length, end)
            span.end(begin)
        replica.end(end)

    def close(self) -> None:
        """Send what is left, and take no more; a collector that does not answer has a moment."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(_CLOSE_SECONDS)
        if flush.is_alive():
            self._exporter.shutdown()  # it would try again for many seconds
        self._provider.shutdown()


def create_tracing(config: TelemetryConfig) -> Tracing | None:
    """Return what sends spans to the configured collector; None where there is none.

    ConfigError where the URL is none, or the packages are not installed.
    """
    if not config.otlp_endpoint:
        return None
    parts = urlsplit(config.otlp_endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"telemetry.otlp_endpoint: must be a URL such as http://127.0.0.1:4318, got "
            f"{config.otlp_endpoint!r}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "telemetry.otlp_endpoint: OpenTelemetry is not installed; install headrace[otel]"
        ) from error
    path = parts.path.rstrip("/") or "/v1/traces"
    return Tracing(OTLPSpanExporter(endpoint=parts._replace(path=path).geturl()), config)


def _parent(trace: TraceContext) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )
    from opentelemetry.trace.span import TraceState

    if not trace.parent_span_id:
        return Context()
    context = SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.parent_span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([trace.state] if trace.state else []),
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def _attributes(facts: SpanFacts, operation: str) -> dict[str, Any]:
    summary = facts.summary
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": summary.endpoint,
        "http.response.status_code": summary.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": summary.model,
        "gen_ai.response.model": summary.model,
        "gen_ai.response.id": summary.request_id,
        "gen_ai.response.finish_reasons": list(summary.finish_reasons),
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.completion_tokens,
        "headrace.usage.cached_tokens": summary.cached_tokens,
    }
    if summary.ttft_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = summary.ttft_seconds
    if facts.error_code is not None:
        attributes["error.type"] = facts.error_code
    return attributes


def _engine_parts(timings: Sequence[RequestTimings]) -> list[tuple[str, int]]:
    """Return (name, nanoseconds) of the stages of the slowest choice."""
    if not timings:
        return []
    slowest = max(
        timings, key=lambda each: each.queue_seconds + each.prefill_seconds + each.decode_seconds
    )
    return [
        ("queue", _nanoseconds(slowest.queue_seconds)),
        ("prefill", _nanoseconds(slowest.prefill_seconds)),
        ("decode", _nanoseconds(slowest.decode_seconds)),
    ]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
