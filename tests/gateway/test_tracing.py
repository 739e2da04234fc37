"""Traces: the caller's context in and out, and the spans of a request as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from headrace.config import TelemetryConfig
from headrace.errors import ConfigError
from headrace.gateway.trace_context import TraceContext, own_trace, received_trace
from headrace.gateway.tracing import Tracing, create_tracing
from headrace.testing.fake_gateway import FakeGateway

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def scope(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in pairs]}


# --- the context ------------------------------------------------------------------


def test_a_valid_context_is_taken() -> None:
    trace = received_trace(
        scope(("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2"))
    )
    assert trace == TraceContext(TRACE, SPAN, is_sampled=True, state="a=1,b=2")
    assert trace.traceparent == PARENT


def test_a_later_version_may_say_more() -> None:
    assert received_trace(scope(("traceparent", f"cc-{TRACE}-{SPAN}-00-more"))) is not None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        PARENT + "-more",
        PARENT.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_an_invalid_context_counts_as_none(parent: str) -> None:
    assert received_trace(scope(("traceparent", parent))) is None


def test_two_contexts_count_as_none() -> None:
    assert received_trace(scope(("traceparent", PARENT), ("traceparent", PARENT))) is None


def test_a_state_that_is_too_long_is_dropped_alone() -> None:
    trace = received_trace(scope(("traceparent", PARENT), ("tracestate", "a=" + "1" * 600)))
    assert trace is not None and trace.state == ""


def test_our_span_is_a_child_of_the_callers() -> None:
    received = TraceContext(TRACE, SPAN, is_sampled=False, state="a=1")
    trace = own_trace(received, 1.0)
    assert (trace.trace_id, trace.parent_span_id, trace.state) == (TRACE, SPAN, "a=1")
    assert trace.span_id != SPAN and not trace.is_sampled


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_where_nobody_has(ratio: float) -> None:
    assert own_trace(None, ratio).is_sampled == bool(ratio)


def test_without_spans_a_context_passes_through_and_none_is_begun(client: TestClient) -> None:
    assert client.get("/health", headers={"traceparent": PARENT}).headers["traceparent"] == PARENT
    assert "traceparent" not in client.get("/health").headers


# --- spans ------------------------------------------------------------------------


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Iterator[FakeGateway]:
    gateway = FakeGateway(tracing=Tracing(exporter, TelemetryConfig()))
    yield gateway
    gateway.assert_idle()
    gateway.state.observers.close()


def spans_of(gateway: FakeGateway, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    assert gateway.state.tracing is not None
    gateway.state.tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_tree_of_spans(
    traced: FakeGateway, exporter: InMemorySpanExporter, stream: bool
) -> None:
    with TestClient(traced.app) as client:
        headers = {"traceparent": PARENT, "tracestate": "a=1"}
        response = client.post(
            "/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers
        )
    spans = spans_of(traced, exporter)
    assert list(spans) == [
        "engine queue",
        "engine prefill",
        "engine decode",
        "replica tiny/0",
        "chat tiny",
    ]
    root, replica = spans["chat tiny"], spans["replica tiny/0"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == SPAN
    assert f"{root.context.trace_id:032x}" == TRACE
    expected = f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert response.headers["traceparent"] == expected
    assert replica.parent is not None and replica.parent.span_id == root.context.span_id
    for name in ("engine queue", "engine prefill", "engine decode"):
        parent = spans[name].parent
        assert parent is not None and parent.span_id == replica.context.span_id
        assert replica.start_time <= spans[name].start_time <= spans[name].end_time  # type: ignore[operator]
        assert spans[name].end_time <= replica.end_time  # type: ignore[operator]
    assert root.start_time <= replica.start_time  # type: ignore[operator]
    assert root.attributes is not None
    attributes = dict(root.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["http.response.status_code"] == 200
    assert root.status.is_ok or root.status.status_code.name == "UNSET"


def test_a_failure_is_an_error_of_the_span(
    traced: FakeGateway, exporter: InMemorySpanExporter
) -> None:
    traced.engine.fails_after = 1
    with TestClient(traced.app) as client:
        status = client.post("/v1/chat/completions", json=CHAT).status_code
    root = spans_of(traced, exporter)["chat tiny"]
    assert status == 500 and root.attributes is not None
    assert root.status.status_code.name == "ERROR"
    assert root.attributes["error.type"] == "engine_failed"


def test_a_refused_request_is_one_span(traced: FakeGateway, exporter: InMemorySpanExporter) -> None:
    with TestClient(traced.app) as client:
        client.post("/v1/chat/completions", json={**CHAT, "temperature": -1})
    spans = spans_of(traced, exporter)
    assert list(spans) == ["chat"]
    assert spans["chat"].parent is None
    assert spans["chat"].status.status_code.name == "UNSET"


def test_what_the_caller_does_not_sample_is_not_recorded(
    traced: FakeGateway, exporter: InMemorySpanExporter
) -> None:
    with TestClient(traced.app) as client:
        headers = {"traceparent": PARENT[:-1] + "0"}
        client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert spans_of(traced, exporter) == {}


# --- the collector ----------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    tracing = create_tracing(TelemetryConfig(otlp_endpoint=url, service_name="front"))
    gateway = FakeGateway(tracing=tracing)
    with TestClient(gateway.app) as client:
        client.post("/v1/chat/completions", json=CHAT)
    assert tracing is not None
    tracing.close()
    gateway.state.observers.close()
    resource = received[0].resource_spans[0]
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "front"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert spans["replica tiny/0"].parent_span_id == spans["chat tiny"].span_id


def test_a_collector_that_is_not_there_holds_up_nobody() -> None:
    tracing = create_tracing(TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"))
    gateway = FakeGateway(tracing=tracing)
    with TestClient(gateway.app) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    gateway.state.observers.close()
    assert tracing is not None
    tracing.close()


def test_no_endpoint_means_no_spans() -> None:
    assert create_tracing(TelemetryConfig()) is None


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://"])
def test_an_endpoint_that_is_no_url_stops_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint"):
        create_tracing(TelemetryConfig(otlp_endpoint=url))
