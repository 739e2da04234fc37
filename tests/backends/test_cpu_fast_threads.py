"""The fast path's threads: fewer when a core is taken, parked when idle, gone when closed."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.pool import (
    DISTURBED_STEPS,
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    ThreadGovernor,
    ThreadGovernors,
    ThreadPool,
)

CALM, DISTURBED = 0.0, 0.5
STEP_SECONDS = FIRST_PAUSE_SECONDS / 16


def steps_with_one(governor: ThreadGovernor) -> int:
    """How many steps in a row have one thread now."""
    count = 0
    while governor.num_threads() == 1:
        governor.observe(CALM, STEP_SECONDS)
        count += 1
        assert count <= MAX_PAUSE_SECONDS / STEP_SECONDS
    return count


def test_one_disturbed_step_changes_nothing() -> None:
    governor = ThreadGovernor(4)
    for _ in range(5):
        governor.observe(DISTURBED, STEP_SECONDS)
        governor.observe(CALM, STEP_SECONDS)
        assert governor.num_threads() == 4


def test_steps_disturbed_in_a_row_give_a_core_back_for_longer_each_time() -> None:
    governor = ThreadGovernor(2)
    for _ in range(DISTURBED_STEPS):
        assert governor.num_threads() == 2
        governor.observe(DISTURBED, STEP_SECONDS)
    pauses = [steps_with_one(governor)]
    for _ in range(8):
        governor.observe(DISTURBED, STEP_SECONDS)  # the trial
        pauses.append(steps_with_one(governor))
    assert pauses[:3] == [16, 32, 64]
    assert pauses[-1] == MAX_PAUSE_SECONDS / STEP_SECONDS


def test_a_long_step_alone_is_pause_enough() -> None:
    governor = ThreadGovernor(2)
    for _ in range(DISTURBED_STEPS):
        governor.observe(DISTURBED, STEP_SECONDS)
    governor.observe(CALM, FIRST_PAUSE_SECONDS)
    assert governor.num_threads() == 2


def test_a_calm_trial_brings_all_threads_back_and_forgets() -> None:
    governor = ThreadGovernor(2)
    for _ in range(DISTURBED_STEPS):
        governor.observe(DISTURBED, STEP_SECONDS)
    steps_with_one(governor)
    for _ in range(3):
        assert governor.num_threads() == 2
        governor.observe(CALM, STEP_SECONDS)
    for _ in range(DISTURBED_STEPS):
        governor.observe(DISTURBED, STEP_SECONDS)
    assert steps_with_one(governor) == 16


def test_disturbances_are_borne_where_one_thread_is_slower_still() -> None:
    governor = ThreadGovernor(2)
    for _ in range(DISTURBED_STEPS):
        governor.observe(DISTURBED, STEP_SECONDS)
    for _ in range(DISTURBED_STEPS):
        assert governor.num_threads() == 1
        governor.observe(CALM, 1.5 * STEP_SECONDS)
    for _ in range(round(FIRST_PAUSE_SECONDS / STEP_SECONDS)):
        assert governor.num_threads() == 2
        governor.observe(DISTURBED, STEP_SECONDS)
    governor.observe(DISTURBED, STEP_SECONDS)
    governor.observe(DISTURBED, STEP_SECONDS)
    assert governor.num_threads() == 1, "tried again after a time"


def test_one_thread_stays_one() -> None:
    governor = ThreadGovernor(1)
    governor.observe(CALM, STEP_SECONDS)
    assert governor.num_threads() == 1


def test_disturbed_decodes_take_no_thread_from_prompts() -> None:
    governors = ThreadGovernors(2)
    while governors.of(1).num_threads() == 2:
        governors.of(1).observe(0.9, 0.003)
    assert governors.of(120).num_threads() == 2
    assert governors.of(64) is governors.of(127)


def empty_step() -> Any:
    """A step of no operations."""
    return SimpleNamespace(parameters=np.zeros(at.NUM_PARAMETERS, np.int64), num_barriers=0)


def wait_until(condition: object, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


def test_workers_park_when_there_is_nothing_to_do_and_wake_for_a_step() -> None:
    step = empty_step()
    pool = ThreadPool(3, [step])
    try:
        for _ in range(3):
            assert wait_until(lambda: pool.num_parked() == 2)
            assert pool.run(step) in (1, 3)
    finally:
        pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-cpu-")]


def test_closing_ends_workers_in_any_state_and_twice_is_once() -> None:
    for _ in range(5):
        step = empty_step()
        pool = ThreadPool(2, [step])
        pool.run(step)
        pool.close()
        pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-cpu-")]
