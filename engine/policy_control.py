"""An engine's policies as the gateway sees them: what is in force, and the two halves of a swap.

A swap is first prepared by every replica and then committed by all, or dropped. What was committed
outlives the engine process: one that is started again is started with it, and one that was
starting meanwhile is told when it is ready.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from headrace.errors import EngineFailed, InvalidRequest
from headrace.types import (
    CommitPolicy,
    DropPolicy,
    PolicyChoice,
    PolicyPrepared,
    PolicyReport,
    PolicyState,
    PreparePolicy,
)

_ANSWER_SECONDS = 30.0

Send = Callable[[PreparePolicy | CommitPolicy | DropPolicy], object]


class PolicyControl:
    """The policies of one engine client. Every method belongs to its event loop."""

    def __init__(self, client_id: str, send: Send) -> None:
        self._id = client_id
        self._send = send
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._kept: dict[str, PolicyChoice] = {}
        self._started_with: dict[str, PolicyChoice] = {}
        self._catching_up: set[int] = set()
        self._benched: dict[str, str] = {}
        self._states: Sequence[PolicyState] = ()

    @property
    def states(self) -> Sequence[PolicyState]:
        """What the engine last said is in force; empty before it was ever ready."""
        return self._states

    async def prepare(self, kind: str, choice: PolicyChoice) -> int:
        """Have the engine load a policy beside the one in force; return the swap's number.

        Raises InvalidRequest with the engine's reason where it refuses, EngineFailed where it does
        not answer: one that comes to an answer later keeps nothing of it.
        """
        swap_id = next(self._ids)
        try:
            error = await self._ask(PreparePolicy(swap_id, kind, choice))
        except BaseException:
            self.drop(swap_id)
            raise
        if error:
            raise InvalidRequest(error, param="use")
        return swap_id

    async def commit(self, swap_id: int, kind: str, choice: PolicyChoice) -> None:
        """Have the engine use what it prepared.

        One that is gone meanwhile comes back with it; one started in between prepares it anew.
        """
        self.keep(kind, choice)
        try:
            if await self._ask(CommitPolicy(swap_id)):
                self.catch_up(kind, choice)
        except EngineFailed as error:
            structlog.get_logger("headrace.engine").warning(
                "policy_swap_awaits_restart", replica=self._id, reason=str(error)
            )

    def keep(self, kind: str, choice: PolicyChoice) -> None:
        """Use a policy from the next start on, or as soon as the engine that is starting is ready."""
        self._kept[kind] = choice
        self._benched.pop(kind, None)

    def bench(self, kind: str, reason: str) -> None:
        """Start the next engines without the policy of a kind, which ended this one, until another is kept."""
        self._benched[kind] = reason

    def give_up(self, reason: str) -> bool:
        """Start the next engines with what the configuration says, since none comes up with what was
        swapped in; False where nothing was."""
        if not self._started_with:
            return False
        structlog.get_logger("headrace.engine").error(
            "policy_swap_lost", replica=self._id, kinds=sorted(self._started_with), reason=reason
        )
        for kind in self._started_with:
            self._kept.pop(kind, None)
            self._benched.pop(kind, None)
        return True

    @property
    def benched(self) -> dict[str, str]:
        """What an engine is to be started without, by kind, and why."""
        return dict(self._benched)

    def drop(self, swap_id: int) -> None:
        self._send(DropPolicy(swap_id))

    # --- the engine's life --------------------------------------------------------

    def starting(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration to start an engine with: what was swapped takes its place."""
        self._started_with = dict(self._kept)
        changed = dict(config)
        if self._kept:
            changed = copy.deepcopy(changed)
            for kind, choice in self._kept.items():
                changed["model"]["policies"][kind] = {"use": choice.use, "options": choice.options}
        return changed

    def ready(self) -> None:
        """Catch up on what was swapped while the engine was starting."""
        for kind, choice in self._kept.items():
            if self._started_with.get(kind) != choice:
                self.catch_up(kind, choice)
        self._started_with = dict(self._kept)

    def catch_up(self, kind: str, choice: PolicyChoice) -> None:
        """Have a ready engine that was not asked prepare what is kept, and then use it."""
        swap_id = next(self._ids)
        self._catching_up.add(swap_id)
        self._send(PreparePolicy(swap_id, kind, choice))

    def gone(self) -> None:
        """Answer whoever waits: the engine does not."""
        self._catching_up.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineFailed(f"the engine of replica '{self._id}' died"))

    def receive(self, frame: PolicyPrepared | PolicyReport) -> None:
        """Take the engine's answer to a swap, or its news."""
        error = ""
        if isinstance(frame, PolicyReport):
            self._states = frame.states
        else:
            error = frame.error
        if frame.swap_id in self._catching_up:
            self._go_on(frame)
        answer = self._answers.get(frame.swap_id)
        if answer is not None and not answer.done():
            answer.set_result(error)

    def _go_on(self, frame: PolicyPrepared | PolicyReport) -> None:
        if isinstance(frame, PolicyPrepared) and not frame.error:
            self._send(CommitPolicy(frame.swap_id))
            return
        self._catching_up.discard(frame.swap_id)
        if isinstance(frame, PolicyPrepared):
            structlog.get_logger("headrace.engine").error(
                "policy_swap_failed", replica=self._id, reason=frame.error
            )

    async def _ask(self, frame: PreparePolicy | CommitPolicy) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[frame.swap_id] = answer
        try:
            self._send(frame)
            return await asyncio.wait_for(answer, _ANSWER_SECONDS)
        except TimeoutError:
            raise EngineFailed(
                f"the engine of replica '{self._id}' did not answer within {_ANSWER_SECONDS:.0f} s"
            ) from None
        finally:
            del self._answers[frame.swap_id]
