"""What fails, fails alone: bad rows, bad steps, bad requests, and the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.backends.simulated.runner import SimulatedStep
from headrace.errors import EngineFailed, InvalidRequest
from headrace.testing.engine_driver import EngineDriver, make_engine_driver
from headrace.testing.engine_driver import generate_alone as alone
from headrace.testing.engine_driver import random_prompt as prompt
from headrace.types import ForwardBatch, StepResult


class Failing:
    """Makes the draws of steps go wrong where a condition on the batch holds."""

    def __init__(self, driver: EngineDriver) -> None:
        self.poisoned: int | None = None
        self.raises = False
        real: Callable[[ForwardBatch], SimulatedStep] = driver.runner.execute

        def execute(batch: ForwardBatch) -> SimulatedStep:
            if self.raises:
                raise RuntimeError("the device fell off /the/bus")
            step = real(batch)
            result = step.result

            def spoiled() -> StepResult:
                answer = result()
                if self.poisoned is not None:
                    rows = batch.token_ids[batch.sample_rows]
                    answer.failed[rows == self.poisoned] = True
                return answer

            step.result = spoiled  # type: ignore[method-assign]
            return step

        driver.runner.execute = execute


def test_rows_that_are_no_numbers_end_only_their_own_sequence() -> None:
    driver = make_engine_driver()
    failing = Failing(driver)
    good = driver.submit(prompt(20), max_tokens=8)
    driver.step()
    failing.poisoned = 299
    bad = driver.submit([*prompt(40, 1), 299], max_tokens=8, n=2)
    driver.step()
    failing.poisoned = None
    driver.run()
    for index in range(2):
        (event,) = driver.events[bad, index]
        assert event.finish_reason == "error"
        assert event.error is not None and event.error.http_status == 500
        assert event.usage is not None and event.usage.completion_tokens == 0
    assert driver.tokens(good) == alone(prompt(20), max_tokens=8)
    again = driver.submit([*prompt(40, 1), 299], max_tokens=1)
    driver.run()
    assert driver.last(again).usage.cached_tokens == 0  # type: ignore[union-attr]
    driver.assert_empty()


def test_a_step_that_raises_ends_what_ran_and_keeps_what_waits() -> None:
    driver = make_engine_driver(max_num_sequences=2)
    failing = Failing(driver)
    running = [driver.submit(prompt(20, s), max_tokens=8, n=1 + s) for s in range(2)]
    waiting = driver.submit(prompt(30), max_tokens=8)
    driver.step()
    failing.raises = True
    driver.step()
    failing.raises = False
    for name, index in ((running[0], 0), (running[1], 0)):
        event = driver.last(name, index)
        assert event.finish_reason == "error"
        assert event.error is not None and event.error.code == "engine_failed"
        assert "/the/bus" not in event.error.message
    driver.run()
    assert driver.tokens(waiting) == alone(prompt(30), max_tokens=8)
    assert driver.last(running[1], 1).finish_reason == "length"
    driver.assert_empty()
    assert driver.generate(prompt(20), max_tokens=8) == alone(prompt(20), max_tokens=8)


def test_a_device_that_is_lost_is_reported() -> None:
    driver = make_engine_driver()
    failing = Failing(driver)
    failing.raises = True
    for seed in range(2):
        driver.submit(prompt(20, seed), max_tokens=8)
        driver.step()
    driver.submit(prompt(20), max_tokens=8)
    with pytest.raises(EngineFailed, match="3 steps in a row"):
        driver.step()


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [5000]},
        {"stop_token_ids": (5000,)},
        {"logit_bias": {5000: 1.0}},
        {"grammar": "root ::= x"},
    ],
)
def test_what_cannot_be_served_is_refused_and_harms_nobody(bad: dict[str, object]) -> None:
    driver = make_engine_driver()
    beside = driver.submit(prompt(20), max_tokens=8)
    driver.step()
    options = dict(bad)
    tokens = options.pop("prompt", [1, 2, 3])
    with pytest.raises(InvalidRequest):
        driver.submit(tokens, max_tokens=2, **options)  # type: ignore[arg-type]
    driver.run()
    assert driver.tokens(beside) == alone(prompt(20), max_tokens=8)
    driver.assert_empty()


def test_closing_drops_requests_and_the_runner_and_takes_no_more() -> None:
    driver = make_engine_driver()
    driver.submit(prompt(20), max_tokens=8)
    driver.step()
    driver.engine.close()
    driver.engine.close()
    driver.assert_empty()
    with pytest.raises(Exception, match="stopping"):
        driver.submit(prompt(20), max_tokens=8)
