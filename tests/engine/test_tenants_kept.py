"""What is kept of tenants: those served last, in bounded memory, for policies to look at only."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.engine.scheduler import MAX_TENANTS
from headrace.policies.scheduling.deficit_prefix import DeficitPrefix
from headrace.policies.scheduling.fair_share import FairShare
from headrace.testing.engine_driver import make_engine_driver, random_prompt
from headrace.types import RequestView, SchedulerView


class Watcher(FairShare):
    """Notes the views it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[SchedulerView] = []

    def prefill_budget(self, view: SchedulerView) -> int:
        self.views.append(view)
        return super().prefill_budget(view)


def test_a_hundred_thousand_tenants_that_come_and_go_leave_the_last_ones() -> None:
    policy = Watcher()
    driver = make_engine_driver(policy=policy)
    driver.generate(random_prompt(20), max_tokens=2)
    view, scheduler = policy.views[-1], driver.engine._scheduler
    fair, local = FairShare(), DeficitPrefix()
    for number in range(100_000):
        tenant = f"tenant-{number}"
        if number % 10 == 0:
            request = RequestView("r", tenant=tenant, num_prompt_tokens=10)
            fair.rank_waiting([request], view)
            local.rank_waiting([request], view)
        scheduler.book(tenant, float(number), input_tokens=10, output_tokens=1)
        if number % 1000 == 0:
            scheduler.book("regular", float(number), output_tokens=1)
        assert len(view.tenants) <= MAX_TENANTS
    assert view.tenants["regular"].output_tokens == 100
    assert f"tenant-{100_000 - MAX_TENANTS}" not in view.tenants
    assert f"tenant-{100_000 - MAX_TENANTS + 10}" in view.tenants
    assert 0 < len(fair._lifts) <= 2 * MAX_TENANTS + 1
    assert 0 < len(local._granted) <= 2 * MAX_TENANTS + 1


def test_whoever_was_served_longest_ago_is_forgotten_first() -> None:
    scheduler = make_engine_driver().engine._scheduler
    for number in range(MAX_TENANTS):
        scheduler.book(str(number), float(number), input_tokens=1)
    scheduler.book("0", 5000.0, output_tokens=2)
    scheduler.book("new", 5001.0, input_tokens=1)
    assert "1" not in scheduler.tenants
    assert (scheduler.tenants["0"].input_tokens, scheduler.tenants["0"].output_tokens) == (1, 2)
    assert scheduler.tenants["0"].last_active == 5000.0
    assert len(scheduler.tenants) == MAX_TENANTS


def test_a_policy_cannot_change_what_was_served() -> None:
    policy = Watcher()
    driver = make_engine_driver(policy=policy)
    driver.generate(random_prompt(20), max_tokens=2)
    [tenants] = {id(view.tenants): view.tenants for view in policy.views}.values()
    [(name, service)] = tenants.items()
    assert (service.input_tokens, service.output_tokens) == (20, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        service.output_tokens = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        tenants[name] = service  # type: ignore[index]
