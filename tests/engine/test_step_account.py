"""Steps counted together are counted and learnt from as one by one, to the last bit."""

from __future__ import annotations

import random

import pytest

from headrace.engine.step_account import StepAccount


@pytest.mark.parametrize("num_before", [0, 60, 1000, 1023, 1024, 1055, 5000])
@pytest.mark.parametrize("num_steps", [1, 7, 8, 31, 32, 33, 200])
def test_steps_in_a_row_count_as_one_by_one(num_before: int, num_steps: int) -> None:
    rng = random.Random(num_before)
    single, together = StepAccount(), StepAccount()
    for account in (single, together):
        rng.seed(num_before)
        for _ in range(num_before):
            account.count(0, 2, rng.randrange(100), rng.random())
    times, now = [], 3.0
    for _ in range(num_steps):
        now += rng.random()
        times.append(now)
    start = 3.0
    for step, time in enumerate(times):
        single.count(0, 4, 100 + 4 * step, time - start)
        start = time
    together.count_decodes(4, 100, 3.0, times)
    assert together.steps_total == single.steps_total == num_before + num_steps
    assert together.seconds_total == single.seconds_total
    assert together.step_time.coefficients == single.step_time.coefficients
    assert together.step_time.num_steps == single.step_time.num_steps
