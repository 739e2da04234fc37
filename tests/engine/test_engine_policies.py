"""Policies from nasty to broken: every request still ends with its own answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import SchedulingGuard
from headrace.testing.engine_driver import generate_alone, make_engine_driver, random_prompt
from headrace.types import RequestView, SchedulerView, StepFacts

TINY: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_model_len": 56}


class Whimsical:
    """Keeps the contract and nothing else: any order, any victim, often no prompt tokens at all."""

    name: ClassVar[str] = "whimsical"

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.steps: list[StepFacts] = []

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        return self.choice.sample(waiting, len(waiting))

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        return self.choice.choice(running)

    def prefill_budget(self, view: SchedulerView) -> int:
        return self.choice.choice([0, 0, 1, view.token_budget])

    def observe(self, step: StepFacts) -> None:
        self.steps.append(step)


class Broken(FirstComeFirstServed):
    """Breaks its contract in a chosen way."""

    def __init__(self, way: str) -> None:
        self.way = way

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        if self.way == "raises":
            raise RuntimeError("no")
        return waiting[1:] if self.way == "forgets" else super().rank_waiting(waiting, view)

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        if self.way == "invents":
            return RequestView(request_id="nobody")
        return super().choose_victim(running, view)

    def prefill_budget(self, view: SchedulerView) -> int:
        return -5 if self.way == "negative" else view.token_budget


@pytest.mark.parametrize("seed", range(8))
def test_under_any_decisions_everybody_ends_with_their_own_answer(seed: int) -> None:
    policy = Whimsical(seed)
    driver = make_engine_driver(**TINY, max_batched_tokens=16, policy=policy)
    names = []
    for number in range(12):
        names.append(
            driver.submit(random_prompt(3 + number, seed), max_tokens=20, priority=number % 3)
        )
        driver.step()
    driver.run()
    for number, name in enumerate(names):
        assert driver.tokens(name) == generate_alone(random_prompt(3 + number, seed), max_tokens=20)
    driver.assert_empty()


@pytest.mark.parametrize("way", ["raises", "forgets", "invents", "negative"])
def test_a_broken_policy_is_counted_and_replaced_and_nobody_notices(way: str) -> None:
    guard = SchedulingGuard(Broken(way), FirstComeFirstServed())
    driver = make_engine_driver(**TINY, max_batched_tokens=16, policy=guard)
    names = [driver.submit(random_prompt(9, seed), max_tokens=30) for seed in range(8)]
    driver.run()
    for seed, name in enumerate(names):
        assert driver.tokens(name) == generate_alone(random_prompt(9, seed), max_tokens=30)
    assert driver.engine.stats().policy_failures_total >= 1
    driver.assert_empty()


def test_a_policy_is_told_who_got_how_many_tokens_and_who_ended() -> None:
    policy = Whimsical(0)
    policy.prefill_budget = lambda view: view.token_budget  # type: ignore[method-assign]
    driver = make_engine_driver(policy=policy, max_batched_tokens=16)
    two = driver.submit(random_prompt(20), max_tokens=2, n=2)
    driver.run()
    assert [step.tokens for step in policy.steps] == [{two: 16}, {two: 4}, {two: 2}]
    assert [step.finished for step in policy.steps] == [(), (), (two,)]
    assert policy.steps[-1].now == driver.clock.now()
    assert sum(step.step_seconds for step in policy.steps) == pytest.approx(driver.clock.now())


def test_the_view_shows_tenants_memory_and_predicted_time() -> None:
    seen: list[tuple[int, int, int, float]] = []

    class Watching(FirstComeFirstServed):
        def prefill_budget(self, view: SchedulerView) -> int:
            served = view.tenants[""].output_tokens if "" in view.tenants else 0
            seen.append((view.num_free_blocks, view.decoding, served, view.step_seconds(0, 1, 30)))
            return view.token_budget

    driver = make_engine_driver(policy=Watching(), prefix_caching=False)
    driver.generate(random_prompt(20), max_tokens=12)
    driver.submit(random_prompt(40), max_tokens=3)
    driver.step()
    driver.submit(random_prompt(20), max_tokens=3)
    driver.run()
    assert [entry[:3] for entry in seen] == [(64, 0, 0), (64, 0, 12), (61, 1, 13)]
    assert seen[0][3] == 0
    assert seen[-1][3] > 0
