"""The two halves of a swap, while the engine between them dies, starts again or never answers."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from headrace.engine import policy_control
from headrace.engine.policy_control import PolicyControl
from headrace.engine.policy_switch import PolicySwitch
from headrace.errors import EngineFailed
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.policy_guard import SchedulingGuard
from headrace.policy_watchdog import Watchdog
from headrace.types import CommitPolicy, DropPolicy, PolicyChoice, PreparePolicy

PRIORITY = PolicyChoice("priority")


class Engines:
    """One engine process after the other, as far as policies go, beside the control that talks to them."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.control = PolicyControl("r0", self.sent.append)
        self.start()

    def start(self) -> None:
        self.guard = SchedulingGuard(FirstComeFirstServed(), FirstComeFirstServed())
        guards = {"scheduling": self.guard}
        self.switch = PolicySwitch(guards, lambda kind, choice: PriorityFirst(), Watchdog())
        self.control.starting({"model": {"policies": {}}})
        self.control.ready()

    async def deliver(self) -> None:
        """Let the engine act on all that was sent to it, and the control take its answers."""
        await asyncio.sleep(0)
        while self.sent:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self.switch.handle(self.sent.pop(0), answers.put)
            self.control.receive(await asyncio.to_thread(answers.get, timeout=30))
            await asyncio.sleep(0)

    async def prepare(self) -> int:
        preparing = asyncio.ensure_future(self.control.prepare("scheduling", PRIORITY))
        await self.deliver()
        return await preparing

    async def commit(self, swap_id: int) -> None:
        committing = asyncio.ensure_future(self.control.commit(swap_id, "scheduling", PRIORITY))
        await self.deliver()
        await committing
        await self.deliver()


def test_a_swap_is_prepared_and_then_committed() -> None:
    async def run() -> None:
        engines = Engines()
        swap_id = await engines.prepare()
        assert engines.guard.policy.name == "fcfs"
        await engines.commit(swap_id)
        assert engines.guard.policy.name == "priority"

    asyncio.run(run())


def test_an_engine_started_between_the_two_halves_prepares_anew() -> None:
    """It never heard of the first half; the second one must not end it."""

    async def run() -> None:
        engines = Engines()
        swap_id = await engines.prepare()
        engines.control.gone()
        engines.start()
        assert not engines.sent
        await engines.commit(swap_id)
        assert engines.guard.policy.name == "priority"

    asyncio.run(run())


def test_what_was_swapped_while_it_started_is_caught_up_on_when_it_is_ready() -> None:
    async def run() -> None:
        engines = Engines()
        engines.control.starting({"model": {"policies": {}}})
        engines.control.keep("scheduling", PRIORITY)
        engines.control.ready()
        assert [type(frame) for frame in engines.sent] == [PreparePolicy]
        await engines.deliver()
        assert engines.guard.policy.name == "priority"

    asyncio.run(run())


@pytest.mark.parametrize("is_loaded_when_dropped", [False, True])
def test_a_policy_that_was_loaded_too_late_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, is_loaded_when_dropped: bool
) -> None:
    """It stayed in the engine for ever: nobody could commit it, and nobody dropped it."""
    monkeypatch.setattr(policy_control, "_ANSWER_SECONDS", 0.01)
    sent: list[Any] = []
    control = PolicyControl("r0", sent.append)
    with pytest.raises(EngineFailed, match="did not answer"):
        asyncio.run(control.prepare("scheduling", PRIORITY))
    assert [type(frame) for frame in sent] == [PreparePolicy, DropPolicy]

    may_load = threading.Event()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def create(kind: str, choice: PolicyChoice) -> PriorityFirst:
        assert may_load.wait(30)
        return PriorityFirst()

    guard = SchedulingGuard(FirstComeFirstServed(), FirstComeFirstServed())
    switch = PolicySwitch({"scheduling": guard}, create, Watchdog())
    switch.handle(sent[0], answers.put)
    if is_loaded_when_dropped:
        may_load.set()
        assert answers.get(timeout=30).error == ""
    switch.handle(sent[1], answers.put)
    if not is_loaded_when_dropped:
        may_load.set()
        assert answers.get(timeout=30).error == ""
    assert switch.num_prepared == 0
    switch.handle(CommitPolicy(sent[0].swap_id), answers.put)
    assert "nothing was prepared" in answers.get(timeout=30).error
    assert guard.policy.name == "fcfs"


def test_a_policy_that_cannot_be_loaded_leaves_nothing_behind() -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    guard = SchedulingGuard(FirstComeFirstServed(), FirstComeFirstServed())
    switch = PolicySwitch({"scheduling": guard}, lambda kind, choice: 1 // 0, Watchdog())
    switch.handle(PreparePolicy(7, "scheduling", PRIORITY), answers.put)
    assert "ZeroDivisionError" in answers.get(timeout=30).error
    assert switch.num_prepared == 0


def test_what_hung_an_engine_stays_benched_until_another_is_kept() -> None:
    control = PolicyControl("r0", lambda frame: None)
    control.bench("scheduling", "it hung")
    assert control.benched == {"scheduling": "it hung"}
    control.keep("eviction", PolicyChoice("lfu"))
    assert control.benched == {"scheduling": "it hung"}
    control.keep("scheduling", PRIORITY)
    assert control.benched == {}


def test_what_was_swapped_in_is_given_up_once_where_no_engine_comes_up_with_it() -> None:
    control = PolicyControl("r0", lambda frame: None)
    assert not control.give_up("the model is gone")
    control.keep("scheduling", PRIORITY)
    config = {"model": {"policies": {"scheduling": {"use": "fcfs"}}}}
    assert control.starting(config)["model"]["policies"]["scheduling"]["use"] == "priority"
    assert control.give_up("the script is gone")
    assert control.starting(config) == config
    assert not control.give_up("the model is gone")
