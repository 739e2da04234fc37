"""A policy that fails is replaced for that call, and benched after repeated strikes."""

from __future__ import annotations

import queue
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import structlog

from headrace.engine.policy_switch import PolicySwitch
from headrace.errors import PluginError
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import AdmissionGuard, GuardLimits, RoutingGuard, SchedulingGuard
from headrace.policy_watchdog import Watchdog
from headrace.testing.policies import check_routing_policy, check_scheduling_policy
from headrace.types import (
    AdmissionView,
    Admit,
    Charge,
    PolicyChoice,
    PolicyPrepared,
    PreparePolicy,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    RoutingRequest,
    SchedulerView,
    StepFacts,
    TicketView,
)

VIEW = SchedulerView(100.0, 512, 4, 1, 10, 100)
WAITING = [RequestView("b", arrival_time=2), RequestView("a", arrival_time=1)]


class Odd(FirstComeFirstServed):
    """Last come, first served, or whatever a test makes of it."""

    name = "odd"

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.calls = 0
        self.__dict__.update(methods)

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        self.calls += 1
        return sorted(waiting, key=lambda request: -request.arrival_time)


def ids(guard: SchedulingGuard) -> list[str]:
    return [request.request_id for request in guard.rank_waiting(WAITING, VIEW)]


def raising(*arguments: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def leaving(*arguments: Any) -> Any:
    sys.exit(1)


def test_a_good_policy_decides() -> None:
    guard = SchedulingGuard(Odd(), FirstComeFirstServed())
    assert ids(guard) == ["b", "a"]
    assert guard.choose_victim(WAITING, VIEW).request_id == "b"
    assert guard.prefill_budget(VIEW) == 512
    assert guard.failures_total == 0


def raising_this(error: BaseException) -> Callable[..., Any]:
    def rank_waiting(*arguments: Any) -> Any:
        raise error

    return rank_waiting


class Wordless(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text was set")


class OwnSignal(BaseException):
    """Not an Exception, as the signals of some frameworks."""


def lingering(waiting: list[RequestView], view: SchedulerView) -> Any:
    try:
        yield from waiting
        yield waiting[0]
    finally:
        raise ValueError("the clean-up fails")


BREACHES: list[Callable[..., Any]] = [
    raising,
    leaving,
    lambda waiting, view: None,
    lambda waiting, view: waiting[:1],
    lambda waiting, view: [waiting[0], waiting[0]],
    lambda waiting, view: [RequestView("b"), RequestView("a")],
    lambda waiting, view: (waiting[0] for _ in iter(int, 1)),
    lambda waiting, view: waiting.clear() or waiting,
    raising_this(Wordless()),
    raising_this(OwnSignal()),
    raising_this(GeneratorExit()),
    raising_this(ValueError("\udcff")),
    lingering,
]


def changing_facts(waiting: Any, view: Any) -> Any:
    for request in waiting:
        request.arrival_time = None
    return waiting


def changing_the_step(waiting: Any, view: Any) -> Any:
    view.token_budget = 10**6
    return waiting


@pytest.mark.parametrize("breach", [changing_facts, changing_the_step])
def test_facts_cannot_be_changed_so_the_builtin_sees_them_whole(breach: Callable[..., Any]) -> None:
    guard = SchedulingGuard(Odd(rank_waiting=breach), FirstComeFirstServed())
    assert ids(guard) == ["a", "b"]
    assert "FrozenInstanceError" in guard.last_failure
    assert VIEW.token_budget == 512


@pytest.mark.parametrize("breach", BREACHES)
def test_the_builtin_decides_a_call_that_fails(breach: Callable[..., Any]) -> None:
    guard = SchedulingGuard(Odd(rank_waiting=breach), FirstComeFirstServed())
    with structlog.testing.capture_logs() as logs:
        assert ids(guard) == ["a", "b"]
    assert guard.failures_total == 1
    assert not guard.is_benched
    assert [
        (log["event"], log["kind"], log["policy"], log["method"], log["decided_by"]) for log in logs
    ] == [("policy_failed", "scheduling", "odd", "rank_waiting", "fcfs")]
    assert len(WAITING) == 2


@pytest.mark.parametrize(
    ("methods", "call", "expected"),
    [
        ({"choose_victim": lambda running, view: None}, "choose_victim", "b"),
        ({"choose_victim": raising}, "choose_victim", "b"),
        ({"prefill_budget": lambda view: -5}, "prefill_budget", 512),
        ({"prefill_budget": lambda view: "many"}, "prefill_budget", 512),
        ({"prefill_budget": lambda view: 10**9}, "prefill_budget", 512),
        ({"prefill_budget": lambda view: 100}, "prefill_budget", 100),
        ({"prefill_budget": lambda view: 0}, "prefill_budget", 0),
    ],
)
def test_victims_and_budgets(methods: dict[str, Any], call: str, expected: Any) -> None:
    guard = SchedulingGuard(Odd(**methods), FirstComeFirstServed())
    if call == "choose_victim":
        assert guard.choose_victim(WAITING, VIEW).request_id == expected
    else:
        assert guard.prefill_budget(VIEW) == expected


def test_a_reason_can_be_sent_and_is_short() -> None:
    """What an error says goes into frames and logs: not every text can be encoded, or is a line."""
    texts = ["\udcff.py", "y" * 10_000_000]
    for text in texts:
        policy = Odd(rank_waiting=raising_this(ValueError(text)))
        guard = SchedulingGuard(policy, FirstComeFirstServed())
        ids(guard)
        assert len(msgspec.msgpack.encode(guard.state())) < 1000
        assert "ValueError" in guard.last_failure


# what cuts it off may come inside a callback of the garbage collector, which then reports it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_recursion_that_catches_its_own_end_leaves_a_short_trace() -> None:
    """Each of its errors holds the one before: a whole traceback would be megabytes."""

    def deeper(waiting: Any, view: Any) -> Any:
        try:
            return deeper(waiting, view)
        except RecursionError:
            return deeper(waiting, view)

    guard = SchedulingGuard(Odd(rank_waiting=deeper), FirstComeFirstServed())
    with structlog.testing.capture_logs() as logs:
        assert ids(guard) == ["a", "b"]
    assert "in deeper" in logs[0]["exception"]
    assert len(logs[0]["exception"]) < 5000


def test_an_interrupt_from_the_keyboard_is_no_strike() -> None:
    guard = SchedulingGuard(Odd(rank_waiting=raising_this(KeyboardInterrupt())), Odd())
    with pytest.raises(KeyboardInterrupt):
        ids(guard)


def test_no_budget_while_nothing_decodes_would_stand_still_for_ever() -> None:
    guard = SchedulingGuard(Odd(prefill_budget=lambda view: 0), FirstComeFirstServed())
    assert guard.prefill_budget(SchedulerView(0.0, 512, 0, 1, 10, 100)) == 512
    assert guard.failures_total == 1


def test_repeated_strikes_bench_the_policy_until_another_is_swapped_in() -> None:
    policy = Odd(rank_waiting=raising)
    guard = SchedulingGuard(policy, FirstComeFirstServed(), GuardLimits(max_strikes=2))
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            assert ids(guard) == ["a", "b"]
    assert guard.is_benched
    assert guard.failures_total == 2
    assert [log["event"] for log in logs] == ["policy_failed", "policy_failed", "policy_benched"]
    assert guard.choose_victim(WAITING, VIEW).request_id == "b"
    guard.swap(Odd())
    assert not guard.is_benched
    assert ids(guard) == ["b", "a"]
    assert guard.failures_total == 2


def test_strikes_are_forgiven_after_enough_good_calls() -> None:
    policy = Odd()
    limits = GuardLimits(max_strikes=2, forgive_after=3)
    guard = SchedulingGuard(policy, FirstComeFirstServed(), limits)
    for _ in range(4):
        policy.__dict__["choose_victim"] = raising
        guard.choose_victim(WAITING, VIEW)
        for _ in range(3):
            ids(guard)
    assert not guard.is_benched
    assert guard.failures_total == 4


class Timer:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_a_slow_policy_is_replaced_too() -> None:
    timer = Timer()

    def slow(waiting: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        timer.time += 0.25
        return waiting

    limits = GuardLimits(slow_seconds=0.2, timer=timer)
    guard = SchedulingGuard(Odd(rank_waiting=slow), FirstComeFirstServed(), limits)
    with structlog.testing.capture_logs() as logs:
        assert ids(guard) == ["a", "b"]
    assert logs[0]["reason"] == "took 250 ms, at most 200 ms are allowed"


def test_observe_is_optional_and_may_fail() -> None:
    facts = StepFacts(0.0, 0.1, {"a": 1}, ())
    silent = SchedulingGuard(Odd(), FirstComeFirstServed())
    silent.observe(facts)
    assert silent.failures_total == 0
    seen: list[StepFacts] = []
    SchedulingGuard(Odd(observe=seen.append), FirstComeFirstServed()).observe(facts)
    assert seen == [facts]
    broken = SchedulingGuard(
        Odd(observe=raising), FirstComeFirstServed(), GuardLimits(max_strikes=1)
    )
    broken.observe(facts)
    assert broken.is_benched
    broken.observe(facts)
    assert broken.failures_total == 1


class Lost(RoundRobin):
    name = "lost"

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("answer", ["nowhere", None, 7, ""])
def test_routing_falls_back_on_the_builtin(answer: Any) -> None:
    guard = RoutingGuard(Lost(answer), RoundRobin())
    replicas = [ReplicaView("r0"), ReplicaView("r1")]
    chosen = [guard.choose(RoutingRequest("m"), replicas, 0.0) for _ in range(4)]
    assert chosen == ["r0", "r1", "r0", "r1"]
    assert guard.failures_total == 3
    assert guard.is_benched


ADMISSION_BREACHES: list[Any] = [
    None,
    "yes",
    Admit((Charge("k", -1, 5),)),
    Admit((Charge("k", 1, 5, -1.0),)),
    Admit((Charge(["k"], 1, 5),)),  # type: ignore[arg-type]
    Admit((Charge("k", float("nan"), 5),)),  # type: ignore[arg-type]
    Admit((Charge("k", 1, float("inf")),)),  # type: ignore[arg-type]
    Admit(("k",)),  # type: ignore[arg-type]
    Queue([], 5.0),  # type: ignore[arg-type]
    Queue("lane", 0.0),
    Reject("caller", float("inf"), "no"),
    Reject("caller", 1.0, None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("answer", ADMISSION_BREACHES)
def test_admission_falls_back_on_the_builtin(answer: Any) -> None:
    class Door(Unlimited):
        name = "door"

        def admit(self, ticket: Any, view: Any, now: float) -> Any:
            return answer

    guard = AdmissionGuard(Door(), Unlimited())
    assert guard.admit(TicketView("arrival"), AdmissionView(), 0.0) == Admit()
    assert guard.failures_total == 1


def test_a_guard_is_itself_a_policy() -> None:
    check_scheduling_policy(lambda: SchedulingGuard(FirstComeFirstServed(), FirstComeFirstServed()))
    check_routing_policy(lambda: RoutingGuard(RoundRobin(), RoundRobin()))


def endless(kind: str, choice: PolicyChoice) -> Any:
    while True:
        pass


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (endless, "was cut off after"),
        (raising_this(GeneratorExit()), "cannot be loaded: GeneratorExit"),
        (raising_this(PluginError("\udcff.py is no policy")), r"\\udcff.py is no policy"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_refused_in_time_and_in_words_that_can_be_sent(
    create: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.policy_guard.LOAD_SECONDS", 0.05)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    guard = SchedulingGuard(Odd(), FirstComeFirstServed())
    watchdog = Watchdog(stuck_after_seconds=0.0)
    watchdog.on_stuck = told.put
    switch = PolicySwitch({"scheduling": guard}, create, watchdog)
    switch.handle(PreparePolicy(1, "scheduling", PolicyChoice("./x.py:X")), told.put)
    answer = told.get(timeout=30)
    assert isinstance(answer, PolicyPrepared)
    assert re.search(reason, answer.error)
    msgspec.msgpack.encode(answer)


def test_a_policy_that_ended_the_engine_before_stays_benched_until_a_swap() -> None:
    guard = SchedulingGuard(Odd(), FirstComeFirstServed())
    switch = PolicySwitch({"scheduling": guard}, lambda kind, choice: Odd(), Watchdog())
    switch.bench({"scheduling": "the engine process hung inside it"})
    assert ids(guard) == ["a", "b"]
    state = switch.report().states[0]
    assert (state.is_benched, state.last_failure) == (True, "the engine process hung inside it")
    guard.swap(Odd())
    assert ids(guard) == ["b", "a"]
