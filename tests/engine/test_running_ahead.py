"""Planning a step while the one before it runs changes no answer, whatever ends, leaves or fails meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import Status
from headrace.errors import EngineFailed
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.testing.driving import plain_request
from headrace.testing.engine_driver import EngineDriver, make_engine_driver, random_prompt
from headrace.types import Abort, StepEvents, Stop, Submit, TokenEvent

POOL: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_model_len": 56}


def check_blocks(driver: EngineDriver) -> None:
    """Every block is held as often as sequences that run, or left while in flight, list it."""
    engine = driver.engine
    scheduler, ahead = engine._scheduler, engine._launcher.ahead
    holders = list(scheduler.running)
    if ahead is not None:
        holders += [
            entry.sequence
            for entry in ahead.plan.entries
            if entry.sequence.status is Status.FINISHED
        ]
    pool = scheduler.kv_cache.pool
    held = [block for sequence in holders for block in sequence.block_ids]
    for block_id in range(pool.num_blocks):
        assert pool.block(block_id).ref_count == held.count(block_id)
    slots = [sequence.slot for sequence in holders]
    assert len(slots) == len(set(slots)) == scheduler.num_slots - scheduler.num_free_slots


def said(driver: EngineDriver, name: str, n: int) -> list[Any]:
    """Return what each choice of a request said, however it was cut into events."""
    found = []
    for index in range(n):
        events: list[TokenEvent] = driver.events[name, index]
        last = events[-1]
        found.append(
            (
                driver.tokens(name, index),
                "".join(event.text for event in events),
                [entry for event in events for entry in event.logprobs or ()],
                (last.finish_reason, last.stop_reason),
                last.usage and (last.usage.prompt_tokens, last.usage.completion_tokens),
            )
        )
    told = [e.prompt_logprobs for i in range(n) for e in driver.events[name, i]]
    return [*found, [report for report in told if report is not None]]


request_strategy = st.fixed_dictionaries(
    {
        "start": st.integers(0, 3),
        "length": st.integers(1, 24),
        "max_tokens": st.integers(1, 14),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), tuple(range(0, 300, 7))]),
        "stop": st.sampled_from([(), ("a", "e")]),
        "min_tokens": st.integers(0, 1),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "priority": st.integers(0, 2),
    }
)
pace_strategy = st.tuples(
    st.integers(0, 6),  # steps before the next one
    st.integers(0, 9),  # abort: 0 at once, 1..3 that many steps later, else never
)


def serve(
    requests: list[tuple[dict[str, Any], tuple[int, int]]], engine: dict[str, Any]
) -> dict[str, list[Any]]:
    """Run a load; return what the requests said that were not aborted."""
    driver = make_engine_driver(**POOL, **engine)
    aborts: dict[str, int] = {}
    wanted: dict[str, int] = {}

    def step() -> None:
        for name in [name for name, when in aborts.items() if when == 0]:
            del aborts[name]
            driver.engine.abort(name)
        driver.step()
        check_blocks(driver)
        for name in aborts:
            aborts[name] -= 1

    for options, (pause, abort) in requests:
        sampling = dict(options)
        start, length = sampling.pop("start"), sampling.pop("length")
        name = driver.submit([1 + (start * 31 + i) % 200 for i in range(length)], **sampling)
        if abort < 4:
            aborts[name] = abort
        else:
            wanted[name] = sampling["n"]
        for _ in range(pause):
            step()
    while driver.engine.has_work():
        step()
    driver.assert_empty()
    return {name: said(driver, name, n) for name, n in wanted.items()}


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(request_strategy, pace_strategy), min_size=1, max_size=10),
    slots=st.integers(1, 6),
    budget=st.integers(1, 24),
    prefix_caching=st.booleans(),
    by_priority=st.booleans(),
)
def test_answers_are_those_of_one_step_at_a_time(
    requests: list[tuple[dict[str, Any], tuple[int, int]]],
    slots: int,
    budget: int,
    prefix_caching: bool,
    by_priority: bool,
) -> None:
    """K07, P20: stops inside, preemption, choices, scores and aborts, in flight or not."""
    engine = {
        "max_num_sequences": slots,
        "max_batched_tokens": budget,
        "prefix_caching": prefix_caching,
    }
    answers = [
        serve(
            requests,
            {**engine, "runs_ahead": ahead, "policy": PriorityFirst() if by_priority else None},
        )
        for ahead in (False, True)
    ]
    assert answers[0] == answers[1]


def launched_ahead(driver: EngineDriver) -> int:
    """Return how many sequences the step in flight has."""
    ahead = driver.engine._launcher.ahead
    return 0 if ahead is None else len(ahead.plan.entries)


def test_a_step_is_in_flight_between_two_calls() -> None:
    driver = make_engine_driver(runs_ahead=True)
    names = [driver.submit(random_prompt(20, s), max_tokens=6) for s in range(3)]
    seen = []
    while driver.engine.has_work():
        driver.step()
        seen.append(launched_ahead(driver))
    assert seen == [3, 3, 3, 3, 3, 0]  # nobody is planned beyond max_tokens
    alone = make_engine_driver()
    for seed, name in enumerate(names):
        assert driver.tokens(name) == alone.generate(random_prompt(20, seed), max_tokens=6)


def test_the_blocks_of_one_that_left_stay_until_the_step_in_flight_is_done() -> None:
    driver = make_engine_driver(runs_ahead=True)
    name = driver.submit(random_prompt(40), max_tokens=20)
    driver.step()
    assert launched_ahead(driver) == 1
    assert driver.engine.abort(name)
    assert driver.engine.stats().num_running == 0
    assert driver.engine.stats().num_free_blocks == 64 - 3
    assert driver.engine.has_work()
    assert driver.step() == []
    driver.assert_empty()


def test_a_stop_drops_what_was_drawn_behind_it() -> None:
    tokens = make_engine_driver().generate(random_prompt(9), max_tokens=8)
    driver = make_engine_driver(runs_ahead=True)
    name = driver.submit(random_prompt(9), max_tokens=8, stop_token_ids=(tokens[3],))
    driver.run()
    assert driver.tokens(name) == tokens[:4]
    assert driver.last(name).usage.completion_tokens == 4  # type: ignore[union-attr]
    driver.assert_empty()


def test_nobody_is_taken_back_while_a_step_writes_its_blocks() -> None:
    driver = make_engine_driver(8, block_size=4, max_model_len=32, runs_ahead=True)
    names = [driver.submit(random_prompt(9, s), max_tokens=16) for s in range(3)]
    while driver.engine.has_work():
        driver.step()
        check_blocks(driver)
    assert driver.engine.stats().preemptions_total > 0
    alone = make_engine_driver()
    for seed, name in enumerate(names):
        assert driver.tokens(name) == alone.generate(random_prompt(9, seed), max_tokens=16)


def test_virtual_time_is_that_of_the_device_alone() -> None:
    """Steps in a row take as long ahead as one at a time: the device is the same."""
    times = []
    for ahead in (False, True):
        driver = make_engine_driver(runs_ahead=ahead)
        driver.generate(random_prompt(30), max_tokens=9)
        times.append(driver.clock.now())
        stats = driver.engine.stats()
        assert abs(stats.step_seconds_total - driver.clock.now()) < 1e-9
    assert abs(times[0] - times[1]) < 1e-9


class Breaking:
    """Makes launching a step, or the result of one, fail."""

    def __init__(self, driver: EngineDriver) -> None:
        self.at_launch = False
        self.at_result = False
        execute = driver.runner.execute

        def launch(batch: Any) -> Any:
            if self.at_launch:
                raise RuntimeError("no launch")
            step = execute(batch)
            result = step.result

            def take() -> Any:
                if self.at_result:
                    raise RuntimeError("no result")
                return result()

            step.result = take
            return step

        driver.runner.execute = launch


def check_recovers(driver: EngineDriver, name: str) -> None:
    assert driver.last(name).finish_reason == "error"
    driver.assert_empty()
    again = driver.generate(random_prompt(20), max_tokens=4)
    assert again == make_engine_driver().generate(random_prompt(20), max_tokens=4)
    driver.assert_empty()


def test_a_result_that_fails_ends_its_step_and_the_one_in_flight() -> None:
    driver = make_engine_driver(runs_ahead=True)
    breaking = Breaking(driver)
    name = driver.submit(random_prompt(20), max_tokens=9)
    driver.step()
    breaking.at_result = True
    driver.step()
    breaking.at_result = False
    check_recovers(driver, name)


def test_a_launch_that_fails_keeps_what_was_there_before_it() -> None:
    driver = make_engine_driver(runs_ahead=True)
    breaking = Breaking(driver)
    name = driver.submit(random_prompt(20), max_tokens=9)
    driver.step()
    breaking.at_launch = True
    driver.step()
    breaking.at_launch = False
    assert len(driver.tokens(name)) == 2
    check_recovers(driver, name)


def test_closing_waits_for_the_step_in_flight() -> None:
    driver = make_engine_driver(runs_ahead=True)
    breaking = Breaking(driver)
    driver.submit(random_prompt(20), max_tokens=9)
    driver.step()
    breaking.at_result = True  # nobody wants it any more, so nobody hears of it
    driver.engine.close()


def test_a_device_that_fails_again_and_again_is_lost() -> None:
    driver = make_engine_driver(runs_ahead=True)
    Breaking(driver).at_result = True
    for _ in range(2):
        driver.submit(random_prompt(5), max_tokens=2)
        driver.step()
    driver.submit(random_prompt(5), max_tokens=2)
    with pytest.raises(EngineFailed, match="3 steps in a row"):
        driver.step()


def test_the_loop_comes_to_rest_with_nothing_in_flight() -> None:
    """S11: a request that leaves with a step in flight gives its blocks back."""
    driver = make_engine_driver(runs_ahead=True)
    frames: list[Any] = []

    def emit(frame: Any) -> None:
        frames.append(frame)
        if len(frames) == 8:
            loop.post(Abort("leaves"))

    loop = EngineLoop(driver.engine, emit, on_rest=lambda: loop.post(Stop()))
    loop.post(Submit(plain_request("stays", max_tokens=9)))
    loop.post(Submit(plain_request("leaves", token=2, max_tokens=400)))
    loop.run()
    reports = [frame for frame in frames if isinstance(frame, StepEvents)]
    stats = reports[-1].stats
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
    ends = [event.request_id for report in reports for event in report.events if event.usage]
    assert ends == ["stays"]
    driver.assert_empty()
