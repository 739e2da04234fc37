"""One sample per request, gauges that cannot go below zero, counters that survive a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.clock import SystemClock
from headrace.config import Config
from headrace.engine.outbox import Outbox
from headrace.engine.streams import StreamMultiplexer
from headrace.errors import EngineFailed
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.gateway.state import GatewayState
from headrace.policies.routing.round_robin import RoundRobin
from headrace.types import EngineStats, RequestSummary, RequestTimings, StepEvents

CHAT = "/v1/chat/completions"
SUMMARY = RequestSummary(
    request_id="r",
    model="m",
    endpoint=CHAT,
    status=200,
    finish_reasons=("stop",),
    prompt_tokens=5,
    cached_tokens=0,
    completion_tokens=9,
    ttft_seconds=0.2,
    tpot_seconds=0.01,
    duration_seconds=0.5,
)
TIMINGS = RequestTimings(
    queue_seconds=0.1,
    prefill_seconds=0.2,
    decode_seconds=0.3,
    ttft_seconds=0.3,
    num_preemptions=1,
)


class StatsClient:
    """A client of which only numbers are asked."""

    id = "m-0"
    state = "ready"
    restarts_total = 2

    def __init__(self) -> None:
        self.stats = EngineStats()


class Page:
    """A rendered page, looked up by name and labels."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.text = metrics.render().decode()
        self.families = list(text_string_to_metric_families(self.text))

    def value(self, name: str, **labels: str) -> float | None:
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == f"headrace_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1, f"{name} {labels} is not one sample"
        return found[0] if found else None


@pytest.fixture
def client() -> StatsClient:
    return StatsClient()


@pytest.fixture
def metrics(client: StatsClient) -> GatewayMetrics:
    replica = Replica("m-0", "m", client)  # type: ignore[arg-type]
    group = ModelGroup("m", (replica,))
    router = Router([group], policy=RoundRobin(), fallback=RoundRobin())
    metrics = GatewayMetrics()
    GatewayState(config=Config(), router=router, metrics=metrics, clock=SystemClock())
    return metrics


def finish(metrics: GatewayMetrics, *timings: RequestTimings, **changes: Any) -> None:
    summary = msgspec.structs.replace(SUMMARY, **changes)
    if summary.model:
        metrics.request_started(summary.model, summary.endpoint)
    metrics.request_finished(summary, timings)


def test_a_request_gives_one_sample_of_each_time_whatever_its_n_and_preemptions(
    metrics: GatewayMetrics,
) -> None:
    slow = msgspec.structs.replace(TIMINGS, decode_seconds=4.0, num_preemptions=3)
    for _ in range(100):
        finish(metrics, TIMINGS, slow, finish_reasons=("stop", "length"))

    page = Page(metrics)
    for name in ("time_to_first_token", "time_per_output_token", "queue", "prefill", "decode"):
        assert page.value(f"{name}_seconds_count", model="m") == 100, name
    assert page.value("decode_seconds_sum") == pytest.approx(400)
    assert page.value("requests_total", model="m", endpoint=CHAT, status="200") == 100
    assert page.value("choices_total", finish_reason="stop") == 100
    assert page.value("choices_total", finish_reason="length") == 100


def test_a_request_without_a_token_gives_no_sample_rather_than_zero(
    metrics: GatewayMetrics,
) -> None:
    finish(metrics, status=500, finish_reasons=("error",), ttft_seconds=None, tpot_seconds=None)
    finish(metrics, status=499, finish_reasons=("abort",), ttft_seconds=None, tpot_seconds=None)

    page = Page(metrics)
    for name in ("time_to_first_token", "time_per_output_token", "queue", "inter_token"):
        assert page.value(f"{name}_seconds_count", model="m") in (None, 0), name
    assert page.value("request_failures_total", model="m") == 1
    assert page.value("request_aborts_total", model="m") == 1
    assert page.value("choices_total", finish_reason="stop") is None


def test_active_requests_rise_and_fall_and_never_below_zero(metrics: GatewayMetrics) -> None:
    metrics.request_started("m", CHAT)
    metrics.request_started("m", CHAT)
    assert Page(metrics).value("requests_active", model="m", endpoint=CHAT) == 2
    for _ in range(2):
        metrics.request_finished(SUMMARY, [TIMINGS])
    metrics.request_finished(msgspec.structs.replace(SUMMARY, status=503), [])

    page = Page(metrics)
    assert page.value("requests_active", model="m", endpoint=CHAT) == 0
    assert page.value("requests_total", status="503") == 1
    assert page.value("time_to_first_token_seconds_count", model="m") == 2


def test_a_refused_request_is_counted_and_nothing_it_sent_becomes_a_label(
    metrics: GatewayMetrics,
) -> None:
    finish(metrics, model="", status=404, finish_reasons=(), ttft_seconds=None, request_id="spy")

    page = Page(metrics)
    assert page.value("requests_total", model="", status="404") == 1
    assert "spy" not in page.text
    labels = {name for family in page.families for s in family.samples for name in s.labels}
    assert labels <= {
        "model", "endpoint", "status", "finish_reason", "replica", "state", "kind", "le", "reason", "term",
    }  # fmt: skip


def test_time_between_tokens_is_a_histogram(metrics: GatewayMetrics) -> None:
    for seconds in (0.01, 0.03):
        metrics.inter_token("m", seconds)

    page = Page(metrics)
    assert page.value("inter_token_seconds_count", model="m") == 2
    assert page.value("inter_token_seconds_sum", model="m") == pytest.approx(0.04)


def test_the_engines_numbers_are_those_of_the_moment(
    metrics: GatewayMetrics, client: StatsClient
) -> None:
    client.stats = EngineStats(
        num_running=3,
        num_waiting=2,
        num_blocks=10,
        num_free_blocks=4,
        preemptions_total=5,
        prefix_query_tokens_total=100,
        prefix_hit_tokens_total=60,
        prompt_tokens_total=120,
        generation_tokens_total=44,
        steps_total=7,
        step_seconds_total=1.5,
        prefill_step_seconds_total=0.5,
        policy_failures_total=1,
    )

    page = Page(metrics)
    expected = {
        "requests_running": 3,
        "requests_waiting": 2,
        "kv_blocks": 10,
        "kv_blocks_free": 4,
        "kv_usage_ratio": 0.6,
        "preemptions_total": 5,
        "prefix_query_tokens_total": 100,
        "prefix_hit_tokens_total": 60,
        "prompt_tokens_total": 120,
        "generation_tokens_total": 44,
        "step_seconds_count": 7,
        "step_seconds_sum": 1.5,
        "prefill_step_seconds_total": 0.5,
        "engine_restarts_total": 2,
    }
    for name, value in expected.items():
        assert page.value(name, model="m", replica="m-0") == pytest.approx(value), name
    assert page.value("policy_failures_total", kind="scheduling") == 1
    assert page.value("policy_failures_total", kind="routing") == 0
    assert page.value("replica_state", state="ready") == 1
    assert page.value("replica_state", state="failed") == 0


def test_an_engine_that_has_not_started_has_no_kv_usage(metrics: GatewayMetrics) -> None:
    assert Page(metrics).value("kv_usage_ratio", model="m") == 0


def test_counters_survive_a_restart_of_the_engine_and_gauges_fall() -> None:
    streams = StreamMultiplexer()

    def say(generated: int, running: int) -> None:
        stats = EngineStats(generation_tokens_total=generated, num_running=running, num_blocks=8)
        streams.receive(StepEvents([], stats))

    say(50, 3)
    say(70, 2)
    streams.fail_all(lambda: EngineFailed("gone"))
    assert streams.stats == EngineStats(generation_tokens_total=70)
    say(0, 0)
    assert streams.stats.generation_tokens_total == 70 and streams.stats.num_blocks == 8
    say(5, 1)
    assert streams.stats.generation_tokens_total == 75
    streams.fail_all(lambda: EngineFailed("gone again"))
    say(1, 1)
    assert streams.stats.generation_tokens_total == 76


def test_statistics_that_waited_in_an_outbox_count_once() -> None:
    outbox, streams = Outbox(), StreamMultiplexer()
    for total in (1, 2, 3):
        outbox.put(StepEvents([], EngineStats(generation_tokens_total=total)))
    for frame in outbox.take():
        assert isinstance(frame, StepEvents)
        streams.receive(frame)

    assert streams.stats.generation_tokens_total == 3
