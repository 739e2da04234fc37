"""The policy is asked for an order when it matters, and for nothing in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import SchedulingGuard
from headrace.testing.engine_driver import EngineDriver, make_engine_driver, random_prompt
from headrace.types import RequestView, SchedulerView


class Asked(FirstComeFirstServed):
    """Notes when it was asked about whom. Its order may change, as far as the scheduler knows."""

    is_order_fixed: ClassVar[bool] = False

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        self.asked.append((view.now, len(waiting)))
        return super().rank_waiting(waiting, view)


def queue_up(policy: Asked, count: int = 4) -> EngineDriver:
    driver = make_engine_driver(policy=policy, max_num_sequences=1)
    for seed in range(count):
        driver.submit(random_prompt(20, seed), max_tokens=60)
    return driver


def test_it_is_asked_when_someone_came_and_when_a_place_became_free() -> None:
    policy = Asked()
    driver = queue_up(policy)
    driver.run()
    assert [count for _, count in policy.asked] == [4, 3, 2, 1]
    assert driver.clock.now() > 0.05 * 5, "far more often than that, were it by the clock"


def test_a_fixed_order_is_asked_for_only_when_someone_came() -> None:
    class Fixed(Asked):
        is_order_fixed: ClassVar[bool] = True

    policy = Fixed()
    queue_up(policy).run()
    assert [count for _, count in policy.asked] == [4]


def test_it_is_asked_at_the_time_it_asked_for() -> None:
    class Timed(Asked):
        def next_decision_at(self, view: SchedulerView) -> float | None:
            return 0.03 if view.now < 0.03 else None

    for guarded in (False, True):
        policy = Timed()
        driver = make_engine_driver(
            policy=SchedulingGuard(policy, FirstComeFirstServed()) if guarded else policy,
            max_num_sequences=1,
        )
        for seed in range(3):
            driver.submit(random_prompt(20, seed), max_tokens=100)
        driver.run()
        assert [count for _, count in policy.asked] == [3, 2, 2, 1]
        assert 0.03 <= policy.asked[1][0] < 0.035


def test_who_does_not_fit_is_ranked_again_while_a_slot_is_free() -> None:
    """Time may change the mind of a policy that does not say when."""
    policy = Asked()
    driver = make_engine_driver(12, policy=policy, block_size=4, max_model_len=48)
    for seed in range(3):
        driver.submit(random_prompt(20, seed), max_tokens=28)
        driver.step()
    driver.run()
    times = [time for time, _ in policy.asked]
    assert len(times) > 3
    assert all(after - before <= 0.056 for before, after in zip(times, times[1:], strict=False))


def test_the_held_back_start_one_by_one_when_no_prompt_is_being_computed() -> None:
    class Holding(Asked):
        def num_to_start(self, view: SchedulerView) -> int:
            return 1

    policy = Holding()
    driver = make_engine_driver(policy=policy, max_batched_tokens=16)
    for seed in range(3):
        driver.submit(random_prompt(40, seed), max_tokens=30)
    prefilling: list[int] = []
    while driver.engine.has_work():
        driver.step()
        prefilling.append(driver.engine._scheduler._refresh_view().prefilling)
    assert max(prefilling) == 1
    driver.assert_empty()


def test_a_swap_asks_the_new_policy_at_once() -> None:
    first, second = Asked(), Asked()
    guard = SchedulingGuard(first, FirstComeFirstServed())
    driver = make_engine_driver(policy=guard, max_num_sequences=1)
    for seed in range(3):
        driver.submit(random_prompt(20, seed), max_tokens=40)
    driver.step()
    guard.swap(second)
    driver.step()
    assert [count for _, count in second.asked] == [2]
    driver.run()
    driver.assert_empty()
