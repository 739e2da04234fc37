"""A call past its time is cut off, however it holds on; what ends in time is never touched."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from headrace import policy_watchdog
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import GuardLimits, SchedulingGuard
from headrace.policy_watchdog import PolicyTimeout, Watchdog
from headrace.types import RequestView, SchedulerView

VIEW = SchedulerView(100.0, 512, 4, 1, 10, 100)


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog()


def spin() -> None:
    while True:
        pass


def catch_everything() -> None:
    while True:
        with contextlib.suppress(BaseException):
            spin()


def go_on_finally() -> None:
    while True:
        try:
            try:
                spin()
            finally:
                time.sleep(0.001)
        except BaseException:
            continue


def catch_ever_deeper() -> None:
    try:
        spin()
    except BaseException:
        catch_ever_deeper()


def wait_in_naps() -> None:
    while True:
        try:
            time.sleep(0.001)
        except BaseException:
            time.sleep(0.001)


@pytest.mark.parametrize(
    "policy", [spin, catch_everything, go_on_finally, catch_ever_deeper, wait_in_naps]
)
def test_a_loop_in_python_always_ends(policy: Callable[[], None], watchdog: Watchdog) -> None:
    tracer = sys.gettrace()
    with pytest.raises(PolicyTimeout):
        watchdog.call(policy, (), 0.03)
    assert sys.gettrace() is tracer


def test_a_call_that_ends_in_time_gives_its_answer_and_its_own_errors(watchdog: Watchdog) -> None:
    assert watchdog.call(divmod, (7, 2), 5.0) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        watchdog.call(divmod, (7, 0), 5.0)


def test_no_timeout_reaches_what_comes_after_a_call(watchdog: Watchdog) -> None:
    """Calls that end at the very moment they are cut off, many times over."""
    for _ in range(100):
        with contextlib.suppress(PolicyTimeout):
            watchdog.call(time.sleep, (0.0199,), 0.0)
        sum(number for number in range(100))


def test_each_thread_is_looked_after_for_itself(watchdog: Watchdog) -> None:
    ended: list[str] = []

    def run(name: str, work: Callable[..., Any], arguments: tuple[Any, ...], limit: float) -> None:
        try:
            watchdog.call(work, arguments, limit)
            ended.append(f"{name} answered")
        except PolicyTimeout:
            ended.append(f"{name} was cut off")

    threads = [
        threading.Thread(target=run, args=("bad", spin, (), 0.03)),
        threading.Thread(target=run, args=("good", time.sleep, (0.2,), 30.0)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(ended) == ["bad was cut off", "good answered"]


def test_a_call_stuck_in_compiled_code_is_reported_once() -> None:
    watchdog = Watchdog(stuck_after_seconds=0.05)
    reasons: list[str] = []
    watchdog.on_stuck = reasons.append
    with pytest.raises(PolicyTimeout):
        watchdog.call(time.sleep, (0.4,), 0.01)
    assert len(reasons) == 1
    assert "compiled code" in reasons[0]


def test_the_thread_ends_with_the_calls_and_comes_back_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.policy_watchdog._IDLE_TICKS", 1)
    watchdog = Watchdog()
    for _ in range(3):
        before = set(threading.enumerate())
        with pytest.raises(PolicyTimeout):
            watchdog.call(spin, (), 0.01)
        for thread in set(threading.enumerate()) - before:
            thread.join(30.0)
            assert not thread.is_alive()


class Endless(FirstComeFirstServed):
    name = "endless"

    def rank_waiting(self, waiting: Any, view: SchedulerView) -> Any:
        catch_everything()

    def next_decision_at(self, view: SchedulerView) -> float | None:
        spin()
        return None


def test_the_builtin_decides_for_a_policy_that_does_not_come_back() -> None:
    guard = SchedulingGuard(
        Endless(), FirstComeFirstServed(), GuardLimits(slow_seconds=0.02, max_strikes=2)
    )
    waiting = [RequestView("b", arrival_time=2), RequestView("a", arrival_time=1)]
    with structlog.testing.capture_logs() as logs:
        order = guard.rank_waiting(waiting, VIEW)
        assert guard.next_decision_at(VIEW) is None
    assert [request.request_id for request in order] == ["a", "b"]
    assert guard.is_benched
    assert [log["event"] for log in logs] == ["policy_failed", "policy_failed", "policy_benched"]
    state = guard.state()
    assert (state.strikes, state.failures_total, state.is_benched) == (2, 2, True)
    assert state.last_failure == "next_decision_at: cut off after 20 ms, which is its limit"


def test_collecting_garbage_is_not_held_against_a_call(watchdog: Watchdog) -> None:
    """A collection stops every thread for as long as the process is large: here, longer than the limit."""
    gc.freeze()  # what other tests left in this process would take longer than is granted
    try:
        garbage = [[number] for number in range(1_000_000)]
        start = time.perf_counter()
        gc.collect()
        limit = (time.perf_counter() - start) / 3
        assert watchdog.call(gc.collect, (), limit) >= 0
        assert len(garbage) == 1_000_000
    finally:
        gc.unfreeze()


def test_a_collection_between_two_readings_of_the_watchdog_is_counted_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number from before a collection with the time from after it would hold it against a call."""
    counts, read_at = iter([3, 4, 4, 4]), []
    count, here = policy_watchdog._num_full_collections, threading.get_ident()

    def one_collection_after_the_first_reading() -> int:
        if threading.get_ident() != here:  # another test's watchdog, on its way out
            return count()
        read_at.append(time.perf_counter())
        return next(counts)

    monkeypatch.setattr(
        policy_watchdog, "_num_full_collections", one_collection_after_the_first_reading
    )
    now, num_collections = policy_watchdog._time_and_num_full_collections()
    assert num_collections == 4
    assert read_at[2] <= now <= read_at[3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_does_nothing_but_collect_garbage_is_cut_off(watchdog: Watchdog) -> None:
    """What is raised in it may arrive in a callback of the collector, and end there; the next one does not."""

    def collect_for_ever() -> None:
        while True:
            gc.collect()

    with pytest.raises(PolicyTimeout):
        watchdog.call(collect_for_ever, (), 0.1)
