"""Where limits are counted: in this process, or in Redis for several gateways (redis_store).

A rate is a bucket that drains at `limit` per window and holds `capacity`: no two windows begin or end
together, so one limit's reset is never another's. What is held (concurrency) is given back by its holder.
All charges of one judgement are taken together or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.types import Charge

HELD_RETRY_SECONDS = 1.0
"""When a place that somebody holds will be free is not known."""
_SWEEP_ABOVE = 1024


@dataclass(frozen=True, slots=True)
class LimitState:
    """How much of one limit is used, in the charge's unit."""

    charge: Charge
    used: float

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.charge.capacity - self.used))

    @property
    def reset_seconds(self) -> float:
        """Until all of it can be taken again, if nothing more is; 0 for what is held."""
        rate = rate_per_second(self.charge)
        return self.used / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of taking charges."""

    states: tuple[LimitState, ...] = ()
    """One per charge, in order: after taking, or as it was where one was refused."""
    refused: Charge | None = None
    retry_after_seconds: float = 0.0
    charged: bool = True
    """Whether the store has noted the charges; not where it could not be asked and fails open."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """One charge that is over: what was held is free, of a rate `refund` was not used after all."""

    charge: Charge
    refund: float = 0.0


class LimitStore(Protocol):
    """Counts charges. `take` is the only thing in admission that may wait."""

    async def take(self, holder: str, charges: Sequence[Charge], now: float) -> Taken:
        """Take all charges for this holder, or none. Raises Unavailable where it fails closed."""
        ...

    def settle(self, holder: str, settlements: Sequence[Settlement], now: float) -> None:
        """Give back; never fails and never waits. Each charge is settled once, by its holder."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """What this gateway's requests hold now, by key."""
        ...

    async def run(self) -> None:
        """Do what the store does in the background, until cancelled or there is nothing to do."""
        ...


def rate_per_second(charge: Charge) -> float:
    """Return at what rate a bucket drains; 0 for what is held, and for a limit of 0."""
    return charge.limit / charge.window_seconds if charge.window_seconds else 0.0


def wait_seconds(charge: Charge, used: float) -> float:
    """Return how long until the charge fits in a bucket this full; inf where it never does."""
    if charge.amount > charge.capacity:
        return math.inf
    if charge.window_seconds is None:
        return HELD_RETRY_SECONDS
    rate = rate_per_second(charge)
    return (used + charge.amount - charge.capacity) / rate if rate else math.inf


@dataclass(slots=True)
class _Level:
    """How full a bucket was at a time."""

    amount: float
    time: float
    rate: float

    def at(self, now: float) -> float:
        return max(0.0, self.amount - max(0.0, now - self.time) * self.rate)


class MemoryLimitStore:
    """Limits of one gateway. `take_now` is the same without waiting, for the simulator."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._levels: dict[str, _Level] = {}
        self._sweep_above = _SWEEP_ABOVE

    @property
    def held(self) -> Mapping[str, int]:
        return self._held

    def __len__(self) -> int:
        return len(self._levels)

    async def take(self, holder: str, charges: Sequence[Charge], now: float) -> Taken:
        return self.take_now(charges, now)

    def take_now(self, charges: Sequence[Charge], now: float) -> Taken:
        """Take all charges, or none."""
        after: dict[str, float] = {}
        for charge in charges:
            used = after.get(charge.key, self._used(charge, now))
            if used + charge.amount > charge.capacity:
                states = tuple(LimitState(each, self._used(each, now)) for each in charges)
                return Taken(states, charge, wait_seconds(charge, used))
            after[charge.key] = used + charge.amount
        for charge in charges:
            self._add(charge, charge.amount, now)
        return Taken(tuple(LimitState(charge, after[charge.key]) for charge in charges))

    def settle(self, holder: str, settlements: Sequence[Settlement], now: float) -> None:
        for settlement in settlements:
            charge = settlement.charge
            if charge.window_seconds is None:
                self._add(charge, -charge.amount, now)
            elif settlement.refund:
                self._add(charge, -settlement.refund, now)

    async def run(self) -> None:
        """There is nothing to do in the background."""

    def _used(self, charge: Charge, now: float) -> float:
        if charge.window_seconds is None:
            return self._held.get(charge.key, 0)
        level = self._levels.get(charge.key)
        return level.at(now) if level is not None else 0.0

    def _add(self, charge: Charge, amount: float, now: float) -> None:
        if charge.window_seconds is None:
            left = self._held.get(charge.key, 0) + int(amount)
            assert left >= 0, f"{charge.key}: more given back than was taken"
            if left:
                self._held[charge.key] = left
            else:
                self._held.pop(charge.key, None)
            return
        used = max(0.0, self._used(charge, now) + amount)
        self._levels[charge.key] = _Level(used, now, rate_per_second(charge))
        if len(self._levels) > self._sweep_above:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Forget empty buckets, which are as good as none. Each walk is paid for by as many new keys."""
        self._levels = {key: level for key, level in self._levels.items() if level.at(now) > 0}
        self._sweep_above = max(_SWEEP_ABOVE, 2 * len(self._levels))
