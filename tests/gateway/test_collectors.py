"""What the metrics say of replicas, of the gate and of callers without a key."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from headrace.config import GatewayConfig
from headrace.gateway.collectors import MAX_REASONS
from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway
from headrace.types import RoutingRequest


def samples(gateway: FakeGateway, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of one metric by their labels' values."""
    page = gateway.metrics.render().decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"headrace_{name}"
    }


def test_a_replica_is_in_one_state_and_its_breaker_too(gateway: FakeGateway) -> None:
    replica = gateway.router.replicas()[0]
    now = gateway.state.clock.now()
    for _ in range(5):
        replica.breaker.failed(now)
    assert {key for key, value in samples(gateway, "replica_state").items() if value} == {
        ("tiny", "tiny/0", "failed")
    }
    breaker = samples(gateway, "replica_breaker_state")
    assert sum(breaker.values()) == 1 and breaker["tiny", "tiny/0", "open"] == 1
    assert samples(gateway, "replica_breaker_opened_total") == {("tiny", "tiny/0"): 1}
    replica.is_draining = True
    assert samples(gateway, "replica_state")["tiny", "tiny/0", "draining"] == 1


def test_work_in_flight_is_counted_by_replica() -> None:
    gateway = FakeGateway(*(FakeClient(f"tiny/{index}", fake_card()) for index in range(2)))
    request = RoutingRequest(model="tiny", num_prompt_tokens=40)
    first, second = gateway.router.replicas()
    hold = gateway.router.place(first, request)
    assert samples(gateway, "replica_requests_in_flight") == {
        ("tiny", first.id): 1,
        ("tiny", second.id): 0,
    }
    assert samples(gateway, "replica_tokens_in_flight")["tiny", first.id] >= 40
    hold.release()
    assert set(samples(gateway, "replica_tokens_in_flight").values()) == {0}


def test_refusals_are_counted_by_reason_and_there_are_only_so_many(gateway: FakeGateway) -> None:
    for number in range(2 * MAX_REASONS):
        gateway.state.admission.refusals[f"reason {number}"] += 1
    counts = samples(gateway, "admission_refusals_total")
    assert len(counts) == MAX_REASONS + 1
    assert counts[("other",)] == MAX_REASONS
    assert sum(counts.values()) == 2 * MAX_REASONS


@pytest.mark.parametrize(("headers", "reason"), [({}, "missing"), ({"x-api-key": "b"}, "unknown")])
def test_callers_without_a_key_are_counted(headers: dict[str, str], reason: str) -> None:
    gateway = FakeGateway(config=GatewayConfig(api_keys_env="KEYS"), environ={"KEYS": "a"})
    with TestClient(gateway.app) as client:
        client.get("/v1/models", headers=headers)
    counts = samples(gateway, "auth_failures_total")
    assert {key[0] for key, value in counts.items() if value} == {reason}


def test_an_idle_gate(gateway: FakeGateway) -> None:
    for name in ("tickets", "queued_requests", "queued_tokens"):
        assert samples(gateway, f"admission_{name}") == {(): 0}
    assert samples(gateway, "observer_facts_dropped_total") == {(): 0}
    kinds = {key[0] for key in samples(gateway, "policy_failures_total")}
    assert kinds == {"scheduling", "eviction", "routing", "admission"}
