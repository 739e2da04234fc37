"""Equal steps run as one: the same tokens at the same times, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.testing.engine_driver import EngineDriver, make_simulation, random_prompt
from headrace.types import EngineStats, StepFacts, TokenEvent


@dataclass
class Story:
    """What happened in a simulation: every token with its time, every end, every step a policy saw."""

    tokens: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    ends: list[TokenEvent] = field(default_factory=list)
    steps: list[StepFacts] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    num_calls: int = 0

    def take(self, driver: EngineDriver, until: float | None) -> None:
        events = driver.engine.step(until)
        self.num_calls += 1
        times = driver.engine.run_times or (driver.clock.now(),)
        for event in events:
            if event.token_ids:
                said = self.tokens.setdefault((event.request_id, event.index), [])
                said += zip(times, event.token_ids, strict=True)
            if event.finish_reason is not None:
                self.ends.append(event)


class Watching(FirstComeFirstServed):
    """First come, first served, and keeps what it is told of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepFacts] = []

    def observe(self, step: StepFacts) -> None:
        self.steps.append(step)


def simulate(
    load: Sequence[tuple[float, dict[str, Any]]], *, as_runs: bool, policy: Any, **engine: Any
) -> Story:
    """Serve requests that arrive at given times, as a simulator does."""
    driver = make_simulation(policy=policy, **engine)
    story = Story()

    def run_until(time: float) -> None:
        while driver.engine.has_work() and driver.clock.now() < time:
            story.take(driver, time if as_runs else None)

    for time, request in load:
        run_until(time)
        driver.clock.set(max(time, driver.clock.now()))
        driver.submit(**request)
    run_until(float("inf"))
    driver.assert_empty()
    story.steps = getattr(policy, "steps", [])
    story.stats = driver.engine.stats()
    return story


request_strategy = st.fixed_dictionaries(
    {
        "start": st.integers(0, 2),
        "length": st.integers(1, 30),
        "max_tokens": st.integers(1, 60),
        "n": st.sampled_from([1, 1, 2]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        "ignore_eos": st.sampled_from([True, True, True, False]),
        "priority": st.integers(0, 1),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 0.1), request_strategy), min_size=1, max_size=14),
    num_blocks=st.sampled_from([24, 40, 400]),
    slots=st.integers(1, 8),
    prefix_caching=st.booleans(),
    policy=st.sampled_from([FirstComeFirstServed, PriorityFirst, Watching]),
)
def test_a_simulation_tells_the_same_story_run_by_run_and_step_by_step(
    arrivals: list[tuple[float, dict[str, Any]]],
    num_blocks: int,
    slots: int,
    prefix_caching: bool,
    policy: Any,
) -> None:
    load, now = [], 0.0
    for pause, options in arrivals:
        now += pause
        request = dict(options)
        start, length = request.pop("start"), request.pop("length")
        request["prompt"] = [1 + (start * 31 + place) % 200 for place in range(length)]
        load.append((now, request))
    engine = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_model_len": 96,
        "max_num_sequences": slots,
        "prefix_caching": prefix_caching,
    }
    single = simulate(load, as_runs=False, policy=policy(), **engine)
    runs = simulate(load, as_runs=True, policy=policy(), **engine)
    assert runs.tokens == single.tokens
    assert [_plain(end) for end in runs.ends] == [_plain(end) for end in single.ends]
    assert runs.steps == single.steps
    assert runs.stats == single.stats
    assert runs.num_calls <= single.num_calls


def _plain(end: TokenEvent) -> tuple[Any, ...]:
    return end.request_id, end.index, end.finish_reason, end.usage, end.timings


def run_times(driver: EngineDriver) -> list[float]:
    return list(driver.engine.run_times)


def test_the_step_that_draws_a_first_token_stands_alone() -> None:
    """Of a prompt one token longer than a step's budget, the last token looks like a decode."""
    driver = make_simulation(max_batched_tokens=16)
    name = driver.submit(random_prompt(17), max_tokens=40)
    driver.engine.step(float("inf"))
    assert driver.engine.quiet_steps()[0] <= 1
    (first,) = driver.engine.step(float("inf"))
    assert (first.request_id, len(first.token_ids)) == (name, 1)
    (rest,) = driver.engine.step(float("inf"))
    assert len(rest.token_ids) == 39 and rest.timings is not None
    assert rest.timings.ttft_seconds is not None
    assert rest.timings.ttft_seconds < rest.timings.decode_seconds / 4


def test_one_call_runs_to_the_next_end_and_to_the_next_arrival() -> None:
    driver = make_simulation()
    short = driver.submit(random_prompt(20), max_tokens=30)
    long = driver.submit(random_prompt(20, 1), max_tokens=80)
    driver.engine.step(float("inf"))  # the prompts
    assert run_times(driver) == []
    events = {event.request_id: event for event in driver.engine.step(float("inf"))}
    assert len(run_times(driver)) == 29
    assert (len(events[short].token_ids), len(events[long].token_ids)) == (29, 29)
    assert events[short].finish_reason == "length"
    arrival = driver.clock.now() + 0.01
    driver.engine.step(arrival)
    times = run_times(driver)
    assert all(time < arrival for time in times[:-1])
    assert times[-1] >= arrival
    assert driver.engine.stats().steps_total == 1 + 29 + len(times)


def test_without_a_time_to_run_until_a_call_is_a_step() -> None:
    driver = make_simulation()
    driver.submit(random_prompt(20), max_tokens=30)
    assert driver.run() == 30


def test_what_could_end_by_its_tokens_is_run_step_by_step() -> None:
    driver = make_simulation()
    driver.submit(random_prompt(20), max_tokens=30, ignore_eos=False)
    driver.engine.step(float("inf"))
    (event,) = driver.engine.step(float("inf"))
    assert len(event.token_ids) == 1


def test_an_engine_without_a_tokenizer_takes_no_request_that_needs_text() -> None:
    driver = make_simulation()
    asked: list[dict[str, Any]] = [{"stop": ("x",)}, {"logprobs": 1}, {"prompt_logprobs": 0}]
    for sampling in asked:
        with pytest.raises(InvalidRequest, match=f"{next(iter(sampling))} needs text"):
            driver.submit(random_prompt(3), **sampling)
    assert driver.generate(random_prompt(3), max_tokens=4)
    driver.assert_empty()
