"""What stands between a policy and the code that trusts its answer.

A policy that raises, answers nonsense or is slow is logged, counted, and the built-in decides that
call instead; after repeated strikes it is benched until another policy is swapped in. One that does
not come back is cut off by the watchdog. Each guard is itself a policy, so whoever holds one needs
to know nothing of this.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import structlog

from headrace.interfaces import AdmissionPolicy, EvictionPolicy, RoutingPolicy, SchedulingPolicy
from headrace.policy_watchdog import PolicyTimeout, Watchdog
from headrace.types import (
    AdmissionView,
    Admit,
    BlockView,
    PolicyChoice,
    PolicyState,
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
    """A call that takes longer is cut off: PolicyTimeout is raised inside it."""
    max_strikes: int = 3
    forgive_after: int = 1000
    """So many good calls in a row wipe the strikes out: a pause a week does not bench a policy."""
    timer: Callable[[], float] = time.perf_counter
    """Real time, even where the engine's clock is virtual: slowness is about this machine."""
    watchdog: Watchdog = field(default_factory=Watchdog)


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
        self.calls_total = 0
        self.seconds_total = 0.0
        """Spent in the policy's own calls, failed ones too."""
        self.last_failure = ""
        self.epoch = 0
        """Changes whenever somebody else decides: another policy, or the built-in for a benched one."""
        self.choice = PolicyChoice(policy.name)

    @property
    def policy(self) -> PolicyT:
        """The policy chosen, whether or not it is benched."""
        return self._policy

    @property
    def is_benched(self) -> bool:
        return self._strikes >= self._limits.max_strikes

    @property
    def deciding(self) -> PolicyT:
        """Whoever decides now: the policy, or the built-in while that is benched."""
        return self._fallback if self.is_benched else self._policy

    def state(self) -> PolicyState:
        """Return what is in force and how it fares."""
        return PolicyState(
            kind=self.kind,
            name=self._policy.name,
            use=self.choice.use,
            options=self.choice.options,
            strikes=self._strikes,
            is_benched=self.is_benched,
            failures_total=self.failures_total,
            calls_total=self.calls_total,
            seconds_total=self.seconds_total,
            last_failure=self.last_failure,
        )

    def swap(self, policy: PolicyT, choice: PolicyChoice | None = None) -> None:
        """Use another policy from the next call on, with no strikes against it."""
        self._policy = policy
        self._strikes = 0
        self._good_calls = 0
        self.last_failure = ""
        self.epoch += 1
        self.choice = choice or PolicyChoice(policy.name)
        _logger.info("policy_swapped", kind=self.kind, policy=policy.name, use=self.choice.use)

    def call(self, method: str, arguments: tuple[Any, ...], check: Callable[[Any], Any]) -> Any:
        """Return the policy's checked answer, or the built-in's.

        The policy gets its own copy of every list, so that sorting one in place harms nobody.
        `check` returns the answer to use, or raises Nonsense with the reason.
        """
        if self._strikes < self._limits.max_strikes:
            own = tuple([list(a) if isinstance(a, (list, tuple)) else a for a in arguments])
            try:
                answer = self._timed(lambda: check(getattr(self._policy, method)(*own)))
            except (Exception, SystemExit, PolicyTimeout) as error:
                self._strike(method, error)
            else:
                if self._strikes:
                    self._forgive()
                return answer
        return getattr(self._fallback, method)(*arguments)

    def _timed(self, ask: Callable[[], Any]) -> Any:
        """Return what `ask` gives; Nonsense where that took too long, whether or not it was cut off."""
        limits = self._limits
        start = limits.timer()
        try:
            answer = limits.watchdog.call(ask, (), limits.slow_seconds)
        finally:
            seconds = limits.timer() - start
            self.calls_total += 1
            self.seconds_total += seconds
        if seconds > limits.slow_seconds:
            raise Nonsense(
                f"took {seconds * 1000:.0f} ms, at most "
                f"{limits.slow_seconds * 1000:.0f} ms are allowed"
            )
        return answer

    def _strike(self, method: str, error: BaseException) -> None:
        self.failures_total += 1
        self._strikes += 1
        self._good_calls = 0
        reason = str(error) if isinstance(error, Nonsense) else f"{type(error).__name__}: {error}"
        if isinstance(error, PolicyTimeout):
            reason = f"cut off after {self._limits.slow_seconds * 1000:.0f} ms, which is its limit"
        self.last_failure = f"{method}: {reason}"
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
            self.epoch += 1
            _logger.error(
                "policy_benched",
                kind=self.kind,
                policy=self._policy.name,
                decided_by=self._fallback.name,
                reason=reason,
            )

    def _forgive(self) -> None:
        self._good_calls += 1
        if self._good_calls >= self._limits.forgive_after:
            self._strikes = 0
            self._good_calls = 0


_ALL = 1 << 62


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
            self._timed(lambda: self._policy.observe(step))  # type: ignore[attr-defined]
        except (Exception, SystemExit, PolicyTimeout) as error:
            self._strike("observe", error)

    def next_decision_at(self, view: SchedulerView) -> float | None:
        """Return when the policy wants to rank again though nothing changed; None: it has no such wish."""
        if self.is_benched or not hasattr(self._policy, "next_decision_at"):
            return None
        try:
            return checked_time(self._timed(lambda: self._policy.next_decision_at(view)))  # type: ignore[attr-defined]
        except (Exception, SystemExit, PolicyTimeout) as error:
            self._strike("next_decision_at", error)
            return None

    def num_to_start(self, view: SchedulerView) -> int:
        """Return how many of the order may start while prompts are being computed."""
        if self.is_benched or not hasattr(self._policy, "num_to_start"):
            return _ALL
        try:
            return checked_count(self._timed(lambda: self._policy.num_to_start(view)))  # type: ignore[attr-defined]
        except (Exception, SystemExit, PolicyTimeout) as error:
            self._strike("num_to_start", error)
            return _ALL


class EvictionGuard(PolicyGuard[EvictionPolicy]):
    kind: ClassVar[str] = "eviction"

    def key(self, block: BlockView, now: float) -> tuple[tuple[float, ...], float | None]:
        key: tuple[tuple[float, ...], float | None] = self.call(
            "key", (block, now), lambda answer: checked_key(answer, now)
        )
        return key if isinstance(key[0], tuple) else checked_key(key, now)


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


def checked_time(answer: Any) -> float | None:
    """Return the time of `next_decision_at` on the engine's clock, or None."""
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or math.isnan(answer):
        raise Nonsense(f"the time is no number and not None: {answer!r}")
    return float(answer)


def checked_count(answer: Any) -> int:
    """Return the answer of `num_to_start`: 0 or more."""
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
        raise Nonsense(f"the number to start is no whole number of at least 0: {answer!r}")
    return answer


def checked_key(answer: Any, now: float) -> tuple[tuple[float, ...], float | None]:
    """Return the answer of `key`, its value as a tuple of numbers: tuples of any lengths compare."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Nonsense(f"the key is no (value, ask_again_at): {answer!r}")
    value, again = answer
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if not isinstance(number, (int, float)) or math.isnan(number):
            raise Nonsense(f"the value is no number and no tuple of numbers: {value!r}")
    ask_again_at = checked_time(again)
    if ask_again_at is not None and ask_again_at <= now:
        raise Nonsense(f"ask_again_at is {ask_again_at}, which is past: it is {now}")
    return numbers, ask_again_at


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
