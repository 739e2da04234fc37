"""Changing an engine's policies while it runs: load and check beside the one in force, then switch.

Loading runs in a thread of its own, since a script may take its time; the switch itself is one
assignment, made by the engine's thread between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import HeadraceError
from headrace.policy_guard import PolicyGuard, load_policy
from headrace.policy_watchdog import Watchdog
from headrace.types import (
    CommitPolicy,
    DropPolicy,
    PolicyChoice,
    PolicyPrepared,
    PolicyReport,
    PolicyState,
    PreparePolicy,
)

Emit = Callable[[PolicyPrepared | PolicyReport], object]


class PolicySwitch:
    """The guards of one engine, and the policies that wait to take a place in them."""

    def __init__(
        self,
        guards: Mapping[str, PolicyGuard[Any]],
        create: Callable[[str, PolicyChoice], Any],
        watchdog: Watchdog,
    ) -> None:
        """`create(kind, choice)` builds a checked policy or raises HeadraceError; called in any thread.

        `watchdog`: the one that looks after all of `guards`.
        """
        self.watchdog = watchdog
        self._loading = Watchdog()
        self._guards = dict(guards)
        self._create = create
        self._prepared: dict[int, tuple[str, PolicyChoice, Any] | None] = {}
        """By swap; None while it is being loaded. One that is dropped meanwhile has no entry."""
        self._prepared_lock = threading.Lock()
        self._failures_told = 0

    @property
    def num_prepared(self) -> int:
        """Policies that are being loaded or wait to be committed."""
        return len(self._prepared)

    def bench(self, reasons: Mapping[str, str]) -> None:
        """Let the built-in decide for these kinds, whose policies ended an engine before this one."""
        for kind, reason in reasons.items():
            self._guards[kind].bench(reason)

    def states(self) -> list[PolicyState]:
        """Return what is in force, one entry per kind."""
        return [guard.state() for guard in self._guards.values()]

    def handle(self, frame: PreparePolicy | CommitPolicy | DropPolicy, emit: Emit) -> None:
        """Act on a frame, in the engine's thread. `emit` may be called from any thread."""
        if isinstance(frame, PreparePolicy):
            self._prepared[frame.swap_id] = None
            name = f"policy {frame.swap_id}"
            threading.Thread(
                target=self._prepare, args=(frame, emit), name=name, daemon=True
            ).start()
        elif isinstance(frame, DropPolicy):
            with self._prepared_lock:
                self._prepared.pop(frame.swap_id, None)
        else:
            self._commit(frame.swap_id, emit)

    def _commit(self, swap_id: int, emit: Emit) -> None:
        prepared = self._prepared.pop(swap_id, None)
        if prepared is None:
            emit(PolicyPrepared(swap_id, "nothing was prepared: this engine was started since"))
            return
        kind, choice, policy = prepared
        self._guards[kind].swap(policy, choice)
        emit(self.report(swap_id))

    def report(self, swap_id: int = 0) -> PolicyReport:
        self._failures_told = self._count_failures()
        return PolicyReport(self.states(), swap_id)

    def has_news(self) -> bool:
        """Whether a policy failed since the last report."""
        return self._count_failures() != self._failures_told

    def _count_failures(self) -> int:
        return sum(guard.failures_total for guard in self._guards.values())

    def _prepare(self, frame: PreparePolicy, emit: Emit) -> None:
        error = ""
        try:
            if frame.kind not in self._guards:
                known = ", ".join(self._guards)
                error = f"kind '{frame.kind}' cannot be swapped in an engine; these can: {known}"
            else:
                policy = load_policy(self._loading, self._create, frame.kind, frame.choice)
                with self._prepared_lock:
                    if frame.swap_id in self._prepared:
                        self._prepared[frame.swap_id] = (frame.kind, frame.choice, policy)
        except HeadraceError as refusal:
            error = str(refusal)
        if error:
            self._prepared.pop(frame.swap_id, None)
        emit(PolicyPrepared(frame.swap_id, error))
