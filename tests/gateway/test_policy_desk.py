"""Swaps over several engines, some of which come and go meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from headrace.engine.policy_control import PolicyControl
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.policy_desk import PolicyDesk
from headrace.types import CommitPolicy, PolicyChoice, PolicyPrepared, PolicyReport, PreparePolicy


def test_an_engine_that_becomes_ready_while_the_others_are_asked_is_not_left_behind() -> None:
    async def run() -> None:
        sent: dict[str, asyncio.Queue[Any]] = {"r0": asyncio.Queue(), "r1": asyncio.Queue()}
        replicas = []
        for name in sent:
            control = PolicyControl(name, sent[name].put_nowait)
            control.starting({"model": {"policies": {}}})
            client = SimpleNamespace(state="starting", policies=control)
            replicas.append(SimpleNamespace(id=name, model_name="m", client=client))
        first, second = (replica.client for replica in replicas)
        first.state = "ready"
        first.policies.ready()
        router = SimpleNamespace(models=lambda: ["m"], replicas=lambda: replicas)
        desk = PolicyDesk(cast(Any, router), AdmissionGate(), cast(Any, None), cast(Any, None))
        choice = PolicyChoice("priority")

        swapping = asyncio.ensure_future(desk.swap("scheduling", choice))
        asked = await sent["r0"].get()
        second.state = "ready"
        second.policies.ready()
        assert sent["r1"].empty()
        first.policies.receive(PolicyPrepared(asked.swap_id))
        committed = await sent["r0"].get()
        first.policies.receive(PolicyReport([], committed.swap_id))
        swapped = await swapping
        assert swapped.replicas == ("r0",)
        prepare = sent["r1"].get_nowait()
        assert isinstance(prepare, PreparePolicy) and prepare.choice == choice
        second.policies.receive(PolicyPrepared(prepare.swap_id))
        assert sent["r1"].get_nowait() == CommitPolicy(prepare.swap_id)

    asyncio.run(run())
