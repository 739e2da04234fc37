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
from typing import Any, Generic, TypeVar

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
PolicyT = TypeVar("PolicyT", SchedulingPolicy, RoutingPolicy, AdmissionPolicy)


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

    kind = ""

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
    def name(self) -> str:
        return self._policy.name

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

        `check` returns the answer to use, or raises Nonsense with the reason.
        """
        if not self.is_benched:
            start = self._limits.timer()
            try:
                answer = check(getattr(self._policy, method)(*arguments))
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
            policy=self.name,
            method=method,
            reason=reason,
            strikes=self._strikes,
            decided_by=self._fallback.name,
            exc_info=None if isinstance(error, Nonsense) else error,
        )
        if self.is_benched:
            _logger.error(
                "policy_benched", kind=self.kind, policy=self.name, decided_by=self._fallback.name
            )

    def _forgive(self) -> None:
        if self._strikes:
            self._good_calls += 1
            if self._good_calls >= self._limits.forgive_after:
                self._strikes = 0
                self._good_calls = 0


class SchedulingGuard(PolicyGuard[SchedulingPolicy]):
    kind = "scheduling"

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        def check(answer: Any) -> list[RequestView]:
            order: list[RequestView] = list(itertools.islice(answer, len(waiting) + 1))
            if len(order) != len(waiting):
                more = "more" if len(order) > len(waiting) else f"only {len(order)}"
                raise Nonsense(f"{more} of {len(waiting)} waiting requests in the order")
            if {id(request) for request in order} != {id(request) for request in waiting}:
                raise Nonsense("the order is no permutation of the waiting requests")
            return order

        answer: Sequence[RequestView] = self.call("rank_waiting", (list(waiting), view), check)
        return answer

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        def check(answer: Any) -> RequestView:
            for request in running:
                if request is answer:
                    return request
            raise Nonsense(f"the victim {answer!r} is not one of the {len(running)} running")

        answer: RequestView = self.call("choose_victim", (list(running), view), check)
        return answer

    def prefill_budget(self, view: SchedulerView) -> int:
        def check(answer: Any) -> int:
            budget = _whole_number(answer, "the budget")
            if budget < 0:
                raise Nonsense(f"the budget is negative: {budget}")
            if budget == 0 and view.decoding == 0 and view.token_budget > 0:
                raise Nonsense("a budget of 0 while nothing decodes: no request would ever run")
            return min(budget, view.token_budget)

        answer: int = self.call("prefill_budget", (view,), check)
        return answer

    def observe(self, step: StepFacts) -> None:
        """Tell the policy of a step where it wants to know."""
        if self.is_benched or not hasattr(self._policy, "observe"):
            return
        try:
            self._policy.observe(step)
        except (Exception, SystemExit) as error:
            self._strike("observe", error)


class RoutingGuard(PolicyGuard[RoutingPolicy]):
    kind = "routing"

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        def check(answer: Any) -> str:
            if not any(replica.id == answer for replica in replicas):
                known = ", ".join(replica.id for replica in replicas)
                raise Nonsense(f"no replica {answer!r} among {known}")
            return str(answer)

        answer: str = self.call("choose", (request, replicas, now), check)
        return answer


class AdmissionGuard(PolicyGuard[AdmissionPolicy]):
    kind = "admission"

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        def check(answer: Any) -> Admit | Queue | Reject:
            if not isinstance(answer, (Admit, Queue, Reject)):
                raise Nonsense(f"the verdict is no Admit, Queue or Reject: {answer!r}")
            if isinstance(answer, Reject) and answer.fault not in ("caller", "server"):
                raise Nonsense(f"the fault is neither 'caller' nor 'server': {answer.fault!r}")
            if isinstance(answer, Admit):
                for charge in answer.charges:
                    if charge.amount < 0 or charge.limit < 0:
                        raise Nonsense(f"a negative charge: {charge!r}")
            return answer

        answer: Admit | Queue | Reject = self.call("admit", (ticket, view, now), check)
        return answer


def _whole_number(answer: Any, what: str) -> int:
    if isinstance(answer, bool):
        raise Nonsense(f"{what} is no whole number: {answer!r}")
    try:
        return operator.index(answer)
    except TypeError:
        raise Nonsense(f"{what} is no whole number: {answer!r}") from None
