"""Time that moves only when told to, so that hours of serving can be tested in a moment."""

from __future__ import annotations


class FakeClock:
    """A Clock set by hand. The simulated backend advances it by what each step would cost."""

    __slots__ = ("_now",)

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock never goes back: advance takes 0 or more, got {seconds}")
        self._now += seconds

    def set(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"a clock never goes back: set takes {self._now} or more, got {now}")
        self._now = now
