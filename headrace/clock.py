"""Real time behind the Clock contract; virtual time is `headrace.testing.FakeClock`."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic seconds since an arbitrary moment."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
