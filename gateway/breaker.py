"""A circuit breaker per replica: after several failures in a row it is left alone for a while.

Plain and synchronous, with time as an argument, because the simulator drives the same object. What
counts as a failure is decided by whoever sends the request; a caller's own mistake never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """When a breaker opens and for how long."""

    max_failures: int = 5
    """So many in a row open it."""
    first_open_seconds: float = 1.0
    max_open_seconds: float = 30.0
    """The time doubles with every trial that fails."""


class CircuitBreaker:
    """Closed: all requests may go. Open: none. Half open: one at a time, as a trial."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._num_failures = 0
        self._open_seconds = 0.0
        self._open_until = 0.0
        self._is_open = False
        self._has_trial = False
        self.opened_total = 0

    @property
    def is_closed(self) -> bool:
        return not self._is_open

    def state(self, now: float) -> BreakerState:
        if not self._is_open:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return not self._is_open or (now >= self._open_until and not self._has_trial)

    def seconds_to_trial(self, now: float) -> float:
        """How long until a request may be tried again; 0 where one may now."""
        return max(0.0, self._open_until - now) if self._is_open else 0.0

    def sent(self) -> bool:
        """Note that a request goes out. True: it is the trial, whose outcome decides."""
        is_trial = self._is_open
        self._has_trial = self._has_trial or is_trial
        return is_trial

    def succeeded(self, *, is_trial: bool = False) -> None:
        """The replica answered. While open only the trial counts: others were sent before."""
        if self._is_open and not is_trial:
            return
        self._is_open = self._has_trial = False
        self._num_failures = 0
        self._open_seconds = 0.0

    def failed(self, now: float, *, is_trial: bool = False) -> None:
        """The replica could not be reached, kept silent or broke."""
        if self._is_open:
            if is_trial:
                self._open(now)
            return
        self._num_failures += 1
        if self._num_failures >= self._rule.max_failures:
            self._open(now)

    def abandoned(self, *, is_trial: bool = False) -> None:
        """The request ended without telling anything of the replica: its caller left."""
        if is_trial:
            self._has_trial = False

    def trip(self, now: float) -> None:
        """Open at once: the replica was found dead otherwise than by a request."""
        if not self._is_open:
            self._open(now)

    def try_now(self, now: float) -> None:
        """End the time of rest: a probe says that the replica answers again."""
        self._open_until = min(self._open_until, now)

    def _open(self, now: float) -> None:
        rule = self._rule
        self._open_seconds = min(
            rule.max_open_seconds, max(rule.first_open_seconds, 2 * self._open_seconds)
        )
        self._open_until = now + self._open_seconds
        self._is_open, self._has_trial = True, False
        self._num_failures = 0
        self.opened_total += 1
