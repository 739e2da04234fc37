"""What Prometheus is told of things as they are at the moment of the scrape: replicas and the gate.

Nothing here is kept, so none of it can be stale or lost. Labels are of our own making: models and replicas
of the configuration, states, kinds of policy, and reasons of refusals, of which so many at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from headrace.gateway.replica import Replica
from headrace.gateway.router import Router
from headrace.policy_guard import PolicyGuard
from headrace.types import EngineStats

if TYPE_CHECKING:
    from headrace.gateway.state import GatewayState

MAX_REASONS = 32
"""Reasons of refusals that get a label; a policy that makes up more of them is counted under "other"."""

_STATES = ("starting", "ready", "draining", "failed", "stopped")
_BREAKER_STATES = ("closed", "open", "half_open")
_REPLICA = ("model", "replica")
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Sequences in the batch", lambda stats: stats.num_running),
    ("requests_waiting", "Requests queued in the engine", lambda stats: stats.num_waiting),
    ("kv_blocks", "KV blocks of the pool", lambda stats: stats.num_blocks),
    ("kv_blocks_free", "KV blocks that can be taken", lambda stats: stats.num_free_blocks),
    ("kv_usage_ratio", "Share of the KV pool in use, 0 to 1", lambda stats: kv_usage(stats)),
    (
        "step_time_error_ratio",
        "Mean error of the learnt step-time model, over the mean step",
        lambda stats: stats.step_time_error,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("preemptions", "Sequences preempted", lambda stats: stats.preemptions_total),
    (
        "prefix_query_tokens",
        "Prompt tokens looked up in the prefix cache, once per request",
        lambda stats: stats.prefix_query_tokens_total,
    ),
    (
        "prefix_hit_tokens",
        "Prompt tokens found there; recomputation after a preemption counts nothing",
        lambda stats: stats.prefix_hit_tokens_total,
    ),
    ("prompt_tokens", "Prompt tokens of requests", lambda stats: stats.prompt_tokens_total),
    (
        "prefill_step_seconds",
        "Of the seconds of steps, those of steps with prompt tokens",
        lambda stats: stats.prefill_step_seconds_total,
    ),
    ("generation_tokens", "Tokens generated", lambda stats: stats.generation_tokens_total),
)


def kv_usage(stats: EngineStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


class ReplicaCollector(Collector):
    """Every replica: its engine's numbers, its state, what the gateway has sent it. `now` is the
    clock that breakers are asked with.
    """

    def __init__(self, router: Router, now: Callable[[], float]) -> None:
        self._router = router
        self._now = now

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        replicas = [(replica, replica.client.stats) for replica in self._router.replicas()]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=_REPLICA)
            for replica, stats in replicas:
                gauge.add_metric(_labels(replica), value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_{name}", text, labels=_REPLICA)
            for replica, stats in replicas:
                counter.add_metric(_labels(replica), value(stats))
            yield counter
        steps = SummaryMetricFamily("headrace_step_seconds", "Steps of an engine", labels=_REPLICA)
        for replica, stats in replicas:
            steps.add_metric(_labels(replica), stats.steps_total, stats.step_seconds_total)
        yield steps
        yield _step_time_model(replicas)
        only = [replica for replica, _ in replicas]
        yield from self._states(only)
        yield from self._loads(only)

    def _states(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "headrace_replica_state",
            "1 for the state a replica is in",
            labels=(*_REPLICA, "state"),
        )
        breaker = GaugeMetricFamily(
            "headrace_replica_breaker_state",
            "1 for the state of a replica's circuit breaker",
            labels=(*_REPLICA, "state"),
        )
        opened = CounterMetricFamily(
            "headrace_replica_breaker_opened",
            "Times a replica's circuit breaker opened",
            labels=_REPLICA,
        )
        restarts = CounterMetricFamily(
            "headrace_engine_restarts",
            "Times an engine died and was started again",
            labels=_REPLICA,
        )
        for replica in replicas:
            for name in _STATES:
                state.add_metric([*_labels(replica), name], float(replica.state == name))
            now_in = replica.breaker.state(self._now())
            for name in _BREAKER_STATES:
                breaker.add_metric([*_labels(replica), name], float(now_in == name))
            opened.add_metric(_labels(replica), replica.breaker.opened_total)
            restarts.add_metric(_labels(replica), replica.client.restarts_total)
        yield from (state, breaker, opened, restarts)

    def _loads(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "headrace_replica_requests_in_flight",
            "Requests the gateway has sent a replica and not seen end",
            labels=_REPLICA,
        )
        tokens = GaugeMetricFamily(
            "headrace_replica_tokens_in_flight",
            "Prompt tokens to compute and output tokens expected of those requests",
            labels=_REPLICA,
        )
        for replica in replicas:
            load = self._router.ledger.load(replica.id)
            requests.add_metric(_labels(replica), load.num_requests)
            tokens.add_metric(_labels(replica), load.num_tokens)
        yield from (requests, tokens)


class GatewayCollector(Collector):
    """The gate, the policies, and who was turned away."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        state = self._state
        gate, auth = state.admission, state.authenticator.counts
        for name, text, value in (
            (
                "admission_tickets",
                "Requests inside the gateway, waiting ones too",
                gate.num_tickets,
            ),
            ("admission_queued_requests", "Requests waiting at the gate", gate.queued_requests),
            ("admission_queued_tokens", "Tokens expected of those", gate.queued_tokens),
        ):
            yield GaugeMetricFamily(f"headrace_{name}", text, value=value)
        refusals = CounterMetricFamily(
            "headrace_admission_refusals", "Requests refused at the gate", labels=("reason",)
        )
        for reason, count in _bounded(gate.refusals).items():
            refusals.add_metric([reason], count)
        yield refusals
        failures = CounterMetricFamily(
            "headrace_auth_failures", "Requests refused for want of a key", labels=("reason",)
        )
        failures.add_metric(["missing"], auth.missing)
        failures.add_metric(["unknown"], auth.unknown)
        yield failures
        yield from self._policies()
        yield CounterMetricFamily(
            "headrace_observer_facts_dropped",
            "Facts that observers were too slow for",
            value=state.observers.num_dropped,
        )

    def _policies(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "headrace_policy_failures",
            "Calls of a policy that the built-in had to decide",
            labels=("kind", *_REPLICA),
        )
        calls = SummaryMetricFamily(
            "headrace_policy_seconds", "Calls of a policy", labels=("kind", *_REPLICA)
        )
        for replica in self._state.router.replicas():
            stats, labels = replica.client.stats, _labels(replica)
            for kind, prefix in (("scheduling", "policy"), ("eviction", "eviction")):
                failures.add_metric([kind, *labels], getattr(stats, f"{prefix}_failures_total"))
                count = getattr(stats, f"{prefix}_calls_total")
                calls.add_metric([kind, *labels], count, getattr(stats, f"{prefix}_seconds_total"))
        own: dict[str, list[PolicyGuard[Any]]] = {"routing": [self._state.router.guard]}
        own["admission"] = [
            policy for policy in self._state.admission.policies if isinstance(policy, PolicyGuard)
        ]
        for kind, guards in own.items():
            failures.add_metric([kind, "", ""], sum(guard.failures_total for guard in guards))
            count = sum(guard.calls_total for guard in guards)
            calls.add_metric([kind, "", ""], count, sum(guard.seconds_total for guard in guards))
        yield from (failures, calls)


def _bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the first reasons that came up, the rest in one."""
    bounded: dict[str, int] = {}
    for number, (reason, count) in enumerate(counts.items()):
        name = reason if number < MAX_REASONS else "other"
        bounded[name] = bounded.get(name, 0) + count
    return bounded


def _step_time_model(replicas: Sequence[tuple[Replica, EngineStats]]) -> Metric:
    learnt = GaugeMetricFamily(
        "headrace_step_time_model_seconds",
        "What the learnt step-time model says one more of each costs",
        labels=(*_REPLICA, "term"),
    )
    for replica, stats in replicas:
        terms = ("step", "prefill_token", "sequence", "kv_row")
        for term, seconds in zip(terms, stats.step_time_coefficients, strict=True):
            learnt.add_metric([*_labels(replica), term], seconds)
    return learnt


def _labels(replica: Replica) -> list[str]:
    return [replica.model_name, replica.id]
