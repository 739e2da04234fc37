"""At what rate requests give back the tokens they held: what a wait in the queue is predicted from."""

from __future__ import annotations

import math

_MEMORY_SECONDS = 20.0


class DrainRate:
    """Tokens per second over about the last twenty seconds, the later ones counting more."""

    __slots__ = ("_since", "_time", "_weight")

    def __init__(self) -> None:
        self._weight = 0.0
        self._time: float | None = None
        self._since = 0.0

    def observe(self, num_tokens: int, now: float) -> None:
        """Count tokens that were given back now."""
        if self._time is None:
            self._time = self._since = now
            return
        self._weight = self._faded(now) + num_tokens
        self._time = max(now, self._time)

    def tokens_per_second(self, now: float) -> float:
        """Return the rate; 0 while nothing is known."""
        seen = now - self._since
        if self._time is None or seen <= 0:
            return 0.0
        return self._faded(now) / (_MEMORY_SECONDS * -math.expm1(-seen / _MEMORY_SECONDS))

    def _faded(self, now: float) -> float:
        assert self._time is not None
        return self._weight * math.exp(min(0.0, self._time - now) / _MEMORY_SECONDS)
