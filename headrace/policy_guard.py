"""What stands between a policy and the code that trusts its answer.

A policy that raises, answers nonsense or is slow is logged, counted, and the built-in decides that
call instead; after repeated strikes it is benched until another policy is swapped in. One that does
not come back is cut off by the watchdog. Each guard is itself a policy, so whoever holds one needs
to know nothing of this.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import structlog

from headrace.errors import HeadraceError, PluginError
from headrace.interfaces import AdmissionPolicy, EvictionPolicy, RoutingPolicy, SchedulingPolicy
from headrace.policy_answers import (
    Nonsense,
    checked_budget,
    checked_count,
    checked_key,
    checked_order,
    checked_replica_id,
    checked_time,
    checked_verdict,
    checked_victim,
    printable,
)
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

    def bench(self, reason: str) -> None:
        """Let the built-in decide until another policy is swapped in."""
        self._strikes = self._limits.max_strikes
        self.last_failure = reason
        self._say_benched(reason)

    def call(self, method: str, arguments: tuple[Any, ...], check: Callable[[Any], Any]) -> Any:
        """Return the policy's checked answer, or the built-in's.

        The policy gets its own copy of every list, so that sorting one in place harms nobody.
        `check` returns the answer to use, or raises Nonsense with the reason.
        """
        if self._strikes < self._limits.max_strikes:
            own = tuple([list(a) if isinstance(a, (list, tuple)) else a for a in arguments])
            try:
                answer = self._timed(lambda: check(getattr(self._policy, method)(*own)))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
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
        reason = self._reason(error)
        self.last_failure = f"{method}: {reason}"
        _logger.warning(
            "policy_failed",
            kind=self.kind,
            policy=self._policy.name,
            method=method,
            reason=reason,
            strikes=self._strikes,
            decided_by=self._fallback.name,
            **({} if isinstance(error, Nonsense) else {"exception": _deepest_frames(error)}),
        )
        if self.is_benched:
            self._say_benched(reason)

    def _say_benched(self, reason: str) -> None:
        self.epoch += 1
        _logger.error(
            "policy_benched",
            kind=self.kind,
            policy=self._policy.name,
            decided_by=self._fallback.name,
            reason=reason,
        )

    def _reason(self, error: BaseException) -> str:
        """Return what went wrong in a line that can be sent and shown, whatever the error's text is."""
        if isinstance(error, PolicyTimeout):
            return f"cut off after {self._limits.slow_seconds * 1000:.0f} ms, which is its limit"
        try:
            text = self._limits.watchdog.call(str, (error,), self._limits.slow_seconds)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            text = f"its text cannot be made ({type(failure).__name__})"
        text = text if isinstance(error, Nonsense) else f"{type(error).__name__}: {text}"
        return printable(text)

    def _forgive(self) -> None:
        self._good_calls += 1
        if self._good_calls >= self._limits.forgive_after:
            self._strikes = 0
            self._good_calls = 0


def load_policy(
    watchdog: Watchdog, create: Callable[[str, PolicyChoice], Any], kind: str, choice: PolicyChoice
) -> Any:
    """Return what `create(kind, choice)` builds; PluginError says why it cannot, or not in time.

    For any thread but the one that serves, with a watchdog of its own that has no `on_stuck`: what a
    script does while it is loaded is not known, and nobody's requests wait for it.
    """
    try:
        return watchdog.call(create, (kind, choice), LOAD_SECONDS)
    except KeyboardInterrupt:
        raise
    except PolicyTimeout:
        reason = f"was cut off after {LOAD_SECONDS:.0f} s: its module or __init__ does not come to an end"
    except HeadraceError as error:
        raise PluginError(printable(str(error), _MAX_REFUSAL)) from error
    except BaseException as error:
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
    raise PluginError(printable(f"{kind} policy '{choice.use}' {reason}", _MAX_REFUSAL))


_ALL = 1 << 62
LOAD_SECONDS = 20.0
_MAX_REFUSAL = 2000
_MAX_FRAMES = 8


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
        self._ask("observe", step, lambda answer: None, None)

    def next_decision_at(self, view: SchedulerView) -> float | None:
        """Return when the policy wants to rank again though nothing changed; None: it has no such wish."""
        at: float | None = self._ask("next_decision_at", view, checked_time, None)
        return at

    def num_to_start(self, view: SchedulerView) -> int:
        """Return how many of the order may start while prompts are being computed."""
        number: int = self._ask("num_to_start", view, checked_count, _ALL)
        return number

    def _ask(self, method: str, about: Any, check: Callable[[Any], Any], otherwise: Any) -> Any:
        """Return the checked answer of a method that a policy need not have."""
        if self.is_benched or not hasattr(self._policy, method):
            return otherwise
        try:
            return self._timed(lambda: check(getattr(self._policy, method)(about)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._strike(method, error)
            return otherwise


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


def _deepest_frames(error: BaseException) -> str:
    """Return the last part of a traceback, without the errors it came from: recursion makes thousands."""
    frames = traceback.format_tb(error.__traceback__, limit=-_MAX_FRAMES)
    return "".join(["Traceback (deepest calls):\n", *frames, type(error).__name__])
