"""Every registered policy keeps its contract; then each one's own rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.quantization.none import AsStored
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.testing.policies import (
    check_admission_policy,
    check_eviction_policy,
    check_quantization_policy,
    check_routing_policy,
    check_scheduling_policy,
)
from headrace.types import (
    AdmissionView,
    Admit,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    RoutingRequest,
    SchedulerView,
    TicketView,
)
from headrace.types.views import set_fact

CHECKS: dict[str, Callable[..., None]] = {
    "scheduling": check_scheduling_policy,
    "eviction": check_eviction_policy,
    "routing": check_routing_policy,
    "admission": check_admission_policy,
    "quantization": check_quantization_policy,
}
REGISTRIES = Registries.from_manager(create_plugin_manager(discover=False))
POLICIES = [(kind, name) for kind in CHECKS for name in REGISTRIES.of(kind).names()]


NEEDED_OPTIONS = {"token_bucket": {"requests_per_minute": 60, "tokens_per_minute": 10_000}}


@pytest.mark.parametrize(("kind", "name"), POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_keeps_its_contract(kind: str, name: str, seed: int) -> None:
    CHECKS[kind](lambda: REGISTRIES.create(kind, name, NEEDED_OPTIONS.get(name)), seed=seed)


def view(**values: Any) -> SchedulerView:
    defaults: dict[str, Any] = {
        "now": 100.0,
        "token_budget": 512,
        "decoding": 4,
        "prefilling": 1,
        "num_free_blocks": 10,
        "num_blocks": 100,
    }
    return SchedulerView(**{**defaults, **values})


def requests(*rows: tuple[str, float, int]) -> list[RequestView]:
    return [
        RequestView(name, arrival_time=arrival, priority=priority)
        for name, arrival, priority in rows
    ]


def ids(order: Sequence[RequestView]) -> list[str]:
    return [request.request_id for request in order]


def test_first_come_first_served() -> None:
    policy = FirstComeFirstServed()
    waiting = requests(("late", 9, 0), ("early", 1, 5), ("tie-1", 4, 0), ("tie-2", 4, 0))
    assert ids(policy.rank_waiting(waiting, view())) == ["early", "tie-1", "tie-2", "late"]
    assert policy.choose_victim(waiting, view()).request_id == "late"
    assert policy.choose_victim(waiting[1:], view()).request_id == "tie-2"
    assert policy.prefill_budget(view(token_budget=77)) == 77


def test_a_preempted_request_comes_back_first() -> None:
    waiting = requests(("new", 5, 0), ("preempted", 1, 0))
    set_fact(waiting[1], "num_preemptions", 3)
    assert ids(FirstComeFirstServed().rank_waiting(waiting, view())) == ["preempted", "new"]


def test_priority_then_arrival() -> None:
    policy, soon = PriorityFirst(), view(now=10.0)
    waiting = requests(("low", 0, 5), ("urgent-2", 3, -1), ("urgent-1", 2, -1), ("mid", 1, 0))
    assert ids(policy.rank_waiting(waiting, soon)) == ["urgent-1", "urgent-2", "mid", "low"]
    assert policy.choose_victim(waiting, soon).request_id == "low"
    assert policy.choose_victim(waiting[1:3], soon).request_id == "urgent-2"


def replicas(*names: str) -> list[ReplicaView]:
    return [ReplicaView(name) for name in names]


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    request = RoutingRequest("m")
    chosen = [policy.choose(request, replicas("b", "a", "c"), 0.0) for _ in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_skips_nobody_when_one_leaves_or_joins() -> None:
    policy = RoundRobin()
    request = RoutingRequest("m")
    assert policy.choose(request, replicas("a", "b", "c"), 0.0) == "a"
    assert policy.choose(request, replicas("a", "c"), 0.0) == "c"
    assert policy.choose(request, replicas("a", "b", "c"), 0.0) == "a"
    assert policy.choose(request, replicas("a", "b", "c"), 0.0) == "b"


def test_round_robin_counts_each_model_by_itself() -> None:
    policy = RoundRobin()
    chosen = []
    for _ in range(2):
        chosen.append(policy.choose(RoutingRequest("x"), replicas("x/0", "x/1"), 0.0))
        chosen.append(policy.choose(RoutingRequest("y"), replicas("y/0", "y/1"), 0.0))
    assert chosen == ["x/0", "y/0", "x/1", "y/1"]


def test_unlimited_admits() -> None:
    assert Unlimited().admit(TicketView("arrival"), AdmissionView(), 0.0) == Admit()


def test_as_stored_quantizes_nothing() -> None:
    policy = AsStored()
    assert policy.scheme_for("x.weight", (4, 4), "q4_1") is None
    with pytest.raises(ValueError, match="makes no parts for 'int4'"):
        policy.quantize(None, "int4", None)  # type: ignore[arg-type]


# --- the checks find what they are for -------------------------------------------------


class Scheduling(FirstComeFirstServed):
    """Wrong in one way, given as functions."""

    def __init__(self, **wrong: Callable[..., Any]) -> None:
        self.__dict__.update(wrong)


def _age(waiting: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
    for request in waiting:
        request.priority -= 1  # type: ignore[misc]
    return waiting


SCHEDULING_BREACHES = [
    ({"rank_waiting": lambda waiting, view: waiting[:-1]}, "the order has"),
    ({"rank_waiting": lambda waiting, view: [*waiting, *waiting]}, "the order has more than"),
    ({"rank_waiting": lambda waiting, view: waiting[:1] * len(waiting)}, "no permutation"),
    (
        {"rank_waiting": lambda waiting, view: [dataclasses.replace(w) for w in waiting]},
        "no permutation",
    ),
    ({"rank_waiting": lambda waiting, view: None}, "raised TypeError"),
    ({"rank_waiting": _age}, "raised FrozenInstanceError"),
    (
        {"choose_victim": lambda running, view: dataclasses.replace(running[0])},
        "victim is not one of",
    ),
    ({"choose_victim": lambda running, view: None}, "victim is not one of"),
    ({"prefill_budget": lambda view: -1}, "no number of tokens: -1"),
    ({"prefill_budget": lambda view: 1.5}, "no whole number: 1.5"),
    ({"prefill_budget": lambda view: True}, "no number of tokens: True"),
    ({"prefill_budget": lambda view: 0}, "while nothing decodes"),
    ({"observe": lambda step: step.nothing}, "observe raised AttributeError"),
]


@pytest.mark.parametrize(("wrong", "message"), SCHEDULING_BREACHES)
def test_a_scheduling_breach_is_found(wrong: dict[str, Callable[..., Any]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        for seed in range(3):
            check_scheduling_policy(lambda: Scheduling(**wrong), seed=seed)


def test_an_order_that_is_drawn_at_random_is_found() -> None:
    orders = iter(range(100))

    def alternating(waiting: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return list(reversed(waiting)) if next(orders) % 2 else waiting

    with pytest.raises(AssertionError, match="two different orders"):
        check_scheduling_policy(lambda: Scheduling(rank_waiting=alternating))


@pytest.mark.parametrize("answer", ["replica-99", None, 0])
def test_a_routing_breach_is_found(answer: Any) -> None:
    class Lost(RoundRobin):
        def choose(self, request: Any, replicas: Any, now: float) -> str:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(AssertionError, match="policy 'round_robin': choose: no replica"):
        check_routing_policy(Lost)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "no Admit, Queue or Reject: None"),
        (True, "no Admit, Queue or Reject: True"),
        (Reject("nobody", 1.0, "because"), "the fault must be 'caller' or 'server'"),
        (Reject("server", -1.0, "because"), "retry_after_seconds is below 0 or"),
        (Reject("server", 1.0, ""), "rejected without a reason"),
        (Queue("lane", -1.0), "queued until -1.0, which is past"),
        (Queue("", 1e9), "a lane without a name"),
    ],
)
def test_an_admission_breach_is_found(answer: Any, message: str) -> None:
    class Door(Unlimited):
        def admit(self, ticket: Any, view: Any, now: float) -> Any:
            return answer

    with pytest.raises(AssertionError, match=message):
        check_admission_policy(Door)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [(4, "gave 4"), ("", "gave ''"), ("int4", "no parts"), ("q8_0", "no parts")],
)
def test_a_quantization_breach_is_found(scheme: Any, message: str) -> None:
    class Odd(AsStored):
        def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> Any:
            return scheme

        def quantize(self, weight: Any, scheme: str, statistics: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(AssertionError, match=message):
        check_quantization_policy(Odd)
