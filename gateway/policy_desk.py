"""The policies in force in the gateway and its engines, and swapping them while requests run.

A swap is all or nothing: every engine of the model loads and checks the new policy, then each switches
between two of its steps; where one refuses, all keep what they have. Routing and admission are the
gateway's own and switch between two requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from headrace.engine.client import PolicyControl
from headrace.errors import EngineFailed, HeadraceError, InvalidRequest, RequestError, Unavailable
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.replica import Replica
from headrace.gateway.router import Router
from headrace.policy_guard import AdmissionGuard, PolicyGuard, load_policy
from headrace.policy_watchdog import Watchdog
from headrace.types import PolicyChoice, PolicyState

ENGINE_KINDS = ("scheduling", "eviction")
GATEWAY_KINDS = ("routing", "admission")


@dataclass(frozen=True, slots=True)
class InForce:
    """One policy at work: of a replica's engine, or of the gateway, then `model` and `replica` are ""."""

    model: str
    replica: str
    state: PolicyState


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swap did, and how long it took from the first question to the last answer."""

    kind: str
    use: str
    models: tuple[str, ...]
    replicas: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class PolicyDesk:
    """Knows every guard of the gateway and every engine's. `create(kind, choice)` builds a checked policy."""

    router: Router
    admission: AdmissionGate
    create: Callable[[str, PolicyChoice], Any]
    guard_admission: Callable[[Any], AdmissionGuard]
    """Put before an admission policy that comes in; it takes the place of all there are."""
    _kept: dict[tuple[str, str], PolicyChoice] = field(default_factory=dict)
    _watchdog: Watchdog = field(default_factory=Watchdog)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def in_force(self) -> list[InForce]:
        """Return every policy at work, the gateway's first."""
        own = [self.router.guard, *self.admission.policies]
        found = [InForce("", "", each.state()) for each in own if isinstance(each, PolicyGuard)]
        for replica in self.router.replicas():
            control = _control(replica)
            if control is not None:
                found += [InForce(replica.model_name, replica.id, s) for s in control.states]
        return found

    def adopt(self, replica: Replica) -> Replica:
        """Have a replica that is not started yet use what was swapped before it came."""
        control = _control(replica)
        if control is not None:
            for (model, kind), choice in self._kept.items():
                if model == replica.model_name:
                    control.keep(kind, choice)
        return replica

    async def swap(self, kind: str, choice: PolicyChoice, *, model: str = "") -> Swapped:
        """Put a policy in the place of the one in force.

        `model`: whose engines; "": every model's. Raises InvalidRequest with the reason where it is
        refused, Unavailable where an engine does not answer: then nothing has changed.
        """
        async with self._lock:
            start = time.perf_counter()
            if kind in GATEWAY_KINDS:
                await self._swap_own(kind, choice)
                return Swapped(kind, choice.use, (), (), time.perf_counter() - start)
            if kind not in ENGINE_KINDS:
                known = ", ".join((*ENGINE_KINDS, *GATEWAY_KINDS))
                raise InvalidRequest(
                    f"kind '{kind}' cannot be swapped while the server runs; these can: {known}",
                    param="kind",
                )
            models = [self.router.resolve(model).name] if model else self.router.models()
            replicas = await self._swap_engines(kind, choice, models)
            seconds = time.perf_counter() - start
            return Swapped(kind, choice.use, tuple(models), tuple(replicas), seconds)

    async def _swap_own(self, kind: str, choice: PolicyChoice) -> None:
        try:
            policy = await asyncio.to_thread(load_policy, self._watchdog, self.create, kind, choice)
        except HeadraceError as error:
            raise InvalidRequest(str(error), param="use") from error
        if kind == "routing":
            self.router.guard.swap(policy, choice)
        else:
            guard = self.guard_admission(policy)
            guard.choice = choice
            self.admission.use([guard])

    async def _swap_engines(
        self, kind: str, choice: PolicyChoice, models: Sequence[str]
    ) -> list[str]:
        replicas = [each for each in self.router.replicas() if each.model_name in models]
        controls = [(each, control) for each in replicas if (control := _control(each)) is not None]
        if not controls:
            raise InvalidRequest(
                f"no engine of this server serves {', '.join(models)}: a policy of kind '{kind}' "
                "would have no place",
                param="model",
            )
        asked = [(each, control) for each, control in controls if each.client.state == "ready"]
        answers = await asyncio.gather(
            *[control.prepare(kind, choice) for _, control in asked], return_exceptions=True
        )
        refusals = [answer for answer in answers if isinstance(answer, BaseException)]
        if refusals or not asked:
            for (_, control), answer in zip(asked, answers, strict=True):
                if isinstance(answer, int):
                    control.drop(answer)
            raise _refusal(refusals)
        for model in models:
            self._kept[model, kind] = choice
        for each, control in controls:
            control.keep(kind, choice)
            if each.client.state == "ready" and (each, control) not in asked:
                control.catch_up(kind, choice)  # it became ready while the others were asked
        await asyncio.gather(
            *[
                control.commit(answer, kind, choice)
                for (each, control), answer in zip(asked, answers, strict=True)
                if isinstance(answer, int) and each.client.state == "ready"
            ]
        )
        structlog.get_logger("headrace.gateway").info(
            "policy_swapped", kind=kind, use=choice.use, replicas=len(asked)
        )
        return [each.id for each, _ in asked]


def _control(replica: Replica) -> PolicyControl | None:
    control: PolicyControl | None = getattr(replica.client, "policies", None)
    return control


def _refusal(reasons: Sequence[BaseException]) -> RequestError:
    """Return what the caller is told; every engine keeps the policy it has."""
    for reason in reasons:
        if isinstance(reason, InvalidRequest):
            return InvalidRequest(f"{reason}; every engine keeps its policy", param="use")
        if not isinstance(reason, EngineFailed):
            raise reason
    said = str(reasons[0]) if reasons else "no engine is ready to check the policy"
    return Unavailable(f"{said}; nothing was changed, try again", retry_after_seconds=2.0)
