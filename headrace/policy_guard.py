"""What stands between a policy and the code that trusts its answer.

A policy that raises, answers nonsense or is slow is logged, counted, and the built-in decides that
call instead; after repeated strikes it is benched until another policy is swapped in. Each guard is
itself a policy, so whoever holds one needs to know nothing of this.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import structlog

from headrace.interfaces import AdmissionPolicy, RoutingPolicy, SchedulingPolicy
from headrace.types import (
    AdmissionView,
    Admit,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    RoutingRequest,
    SchedulerView,
    StepFacts,
    TicketView,
)

_logger = structlog.get_logger(__name__)


class _Named(Protocol):
    name: ClassVar[str]


PolicyT = TypeVar("PolicyT", bound=_Named)


class Nonsense(Exception):
    """A policy's answer breaks its contract."""


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """When a call is a strike and when strikes bench a policy."""

    slow_seconds: float = 0.1
    max_strikes: int = 3
    forgive_after: int = 1000
    """So many good calls in a row wipe the strikes out: a pause a week does not bench a policy."""
    timer: Callable[[], float] = time.perf_counter
    """Real time, even where the engine's clock is virtual: slowness is about this machine."""


class PolicyGuard(Generic[PolicyT]):
    """Calls a policy, checks what it answers and falls back on a built-in."""

    name: ClassVar[str] = "guard"
    kind: ClassVar[str] = ""

    def __init__(
        self, policy: PolicyT, fallback: PolicyT, limits: GuardLimits | None = None
    ) -> None:
        self._policy = policy
        self._fallback = fallback
        self._limits = limits or GuardLimits()
        self._strikes = 0
        self._good_calls = 0
        self.failures_total = 0

    @property
    def policy(self) -> PolicyT:
        """The policy chosen, whether or not it is benched."""
        return self._policy

    @property
    def is_benched(self) -> bool:
        return self._strikes >= self._limits.max_strikes

    def swap(self, policy: PolicyT) -> None:
        """Use another policy from the next call on, with no strikes against it."""
        self._policy = policy
        self._strikes = 0
        self._good_calls = 0

    def call(self, method: str, arguments: tuple[Any, ...], check: Callable[[Any], Any]) -> Any:
        """Return the policy's checked answer, or the built-in's.

        The policy gets its own copy of every list, so that sorting one in place harms nobody.
        `check` returns the answer to use, or raises Nonsense with the reason.
        """
        if not self.is_benched:
            own = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in arguments)
            start = self._limits.timer()
            try:
                answer = check(getattr(self._policy, method)(*own))
                seconds = self._limits.timer() - start
                if seconds > self._limits.slow_seconds:
                    raise Nonsense(
                        f"took {seconds * 1000:.0f} ms, at most "
                        f"{self._limits.slow_seconds * 1000:.0f} ms are allowed"
                    )
            except (Exception, SystemExit) as error:
                self._strike(method, error)
            else:
                self._forgive()
                return answer
        return getattr(self._fallback, method)(*arguments)

    def _strike(self, method: str, error: BaseException) -> None:
        self.failures_total += 1
        self._strikes += 1
        self._good_calls = 0
        reason = str(error) if isinstance(error, Nonsense) else f"{type(error).__name__}: {error}"
        _logger.warning(
            "policy_failed",
            kind=self.kind,
            policy=self._policy.name,
            method=method,
            reason=reason,
            strikes=self._strikes,
            decided_by=self._fallback.name,
            exc_info=None if isinstance(error, Nonsense) else error,
        )
        if self.is_benched:
            _logger.error(
                "policy_benched",
                kind=self.kind,
                policy=self._policy.name,
                decided_by=self._fallback.name,
            )

    def _forgive(self) -> None:
        if self._strikes:
            self._good_calls += 1
            if self._good_calls >= self._limits.forgive_after:
                self._strikes = 0
                self._good_calls = 0


class SchedulingGuard(PolicyGuard[SchedulingPolicy]):
    kind: ClassVar[str] = "scheduling"

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        order: Sequence[RequestView] = self.call(
            "rank_waiting", (list(waiting), view), lambda answer: checked_order(answer, waiting)
        )
        return order

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        victim: RequestView = self.call(
            "choose_victim", (list(running), view), lambda answer: checked_victim(answer, running)
        )
        return victim

    def prefill_budget(self, view: SchedulerView) -> int:
        budget: int = self.call(
            "prefill_budget", (view,), lambda answer: checked_budget(answer, view)
        )
        return budget

    def observe(self, step: StepFacts) -> None:
        """Tell the policy of a step where it wants to know."""
        if self.is_benched or not hasattr(self._policy, "observe"):
            return
        try:
            self._policy.observe(step)
        except (Exception, SystemExit) as error:
            self._strike("observe", error)


class RoutingGuard(PolicyGuard[RoutingPolicy]):
    kind: ClassVar[str] = "routing"

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        replica_id: str = self.call(
            "choose",
            (request, list(replicas), now),
            lambda answer: checked_replica_id(answer, replicas),
        )
        return replica_id


class AdmissionGuard(PolicyGuard[AdmissionPolicy]):
    kind: ClassVar[str] = "admission"

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        verdict: Admit | Queue | Reject = self.call(
            "admit", (ticket, view, now), lambda answer: checked_verdict(answer, now)
        )
        return verdict


def checked_order(answer: Any, waiting: Sequence[RequestView]) -> list[RequestView]:
    """Return the order of `rank_waiting` as a list: the same views, each exactly once."""
    order: list[RequestView] = list(itertools.islice(answer, len(waiting) + 1))
    if len(order) != len(waiting):
        count = "more than" if len(order) > len(waiting) else f"{len(order)} of"
        raise Nonsense(f"the order has {count} the {len(waiting)} waiting requests")
    if {id(request) for request in order} != {id(request) for request in waiting}:
        raise Nonsense("the order is no permutation of the waiting requests")
    return order


def checked_victim(answer: Any, running: Sequence[RequestView]) -> RequestView:
    """Return the victim of `choose_victim`: one of the running views itself, not a copy."""
    if any(request is answer for request in running):
        victim: RequestView = answer
        return victim
    raise Nonsense(f"the victim is not one of the {len(running)} running requests: {answer!r}")


def checked_budget(answer: Any, view: SchedulerView) -> int:
    """Return the tokens of `prefill_budget`, at most the step's own budget."""
    try:
        budget = operator.index(answer)
    except TypeError:
        raise Nonsense(f"the budget is no whole number: {answer!r}") from None
    if isinstance(answer, bool) or budget < 0:
        raise Nonsense(f"the budget is no number of tokens: {answer!r}")
    if budget == 0 and view.decoding == 0 and view.token_budget > 0:
        raise Nonsense("a budget of 0 while nothing decodes: no request would ever run")
    return min(budget, view.token_budget)


def checked_replica_id(answer: Any, replicas: Sequence[ReplicaView]) -> str:
    """Return the id of `choose`: that of a replica which was offered."""
    for replica in replicas:
        if replica.id == answer:
            return replica.id
    known = ", ".join(replica.id for replica in replicas)
    raise Nonsense(f"no replica {answer!r} was offered, only {known}")


def checked_verdict(answer: Any, now: float) -> Admit | Queue | Reject:
    """Return the verdict of `admit` where its fields make sense."""
    if isinstance(answer, Admit):
        for charge in answer.charges:
            if charge.amount < 0 or charge.limit < 0 or (charge.window_seconds or 1.0) <= 0:
                raise Nonsense(f"a charge below zero: {charge!r}")
        return answer
    if isinstance(answer, Queue):
        if not answer.until > now:
            raise Nonsense(f"queued until {answer.until}, which is past: it is {now}")
        return answer
    if isinstance(answer, Reject):
        if answer.fault not in ("caller", "server"):
            raise Nonsense(f"the fault must be 'caller' or 'server', got {answer.fault!r}")
        if not answer.retry_after_seconds >= 0:
            raise Nonsense(f"retry_after_seconds is below 0: {answer.retry_after_seconds!r}")
        return answer
    raise Nonsense(f"the verdict is no Admit, Queue or Reject: {answer!r}")
