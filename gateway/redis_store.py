"""Limits counted in Redis, for several gateways that share them.

One script takes all charges of a judgement in one round trip, by Redis' own clock. Places that are held are
leases: a gateway renews those of its requests, and what a dead one held is free again after a while. Every
key expires by itself. What is given back travels in the background, so that no request waits for it.

While Redis cannot be reached, nobody waits for it either: after a failure it is left alone for a growing
pause, and meanwhile everybody comes in (`open`) or nobody (`closed`), as configured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from headrace.errors import Unavailable
from headrace.gateway.limit_store import (
    LimitState,
    Settlement,
    Taken,
    rate_per_second,
    wait_seconds,
)
from headrace.gateway.redis_scripts import RENEW, SETTLE, TAKE
from headrace.types import Charge

_LEASE_SECONDS = 30.0
_RENEW_SECONDS = _LEASE_SECONDS / 3
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_MAX_BATCH = 256
_MAX_CONNECTIONS = 32
_MAX_PENDING = 10_000
_logger = structlog.get_logger("headrace.gateway")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Where Redis is, and what happens while it is not there."""

    url: str
    fails_open: bool = True
    timeout_seconds: float = 0.1
    """For one answer; the connection included."""
    key_prefix: str = "headrace"


class RedisLimitStore:
    """A LimitStore on one Redis (standalone, or one slot of a cluster)."""

    def __init__(self, settings: RedisSettings, now: Callable[[], float]) -> None:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._settings = settings
        self._now = now
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            settings.url,
            max_connections=_MAX_CONNECTIONS,
            timeout=settings.timeout_seconds,
            socket_timeout=settings.timeout_seconds,
            socket_connect_timeout=settings.timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = redis.asyncio.Redis.from_pool(pool)
        self._scripts = {text: self._client.register_script(text) for text in (TAKE, SETTLE, RENEW)}
        self._leases: dict[str, list[Charge]] = {}
        self._pending: deque[tuple[str, tuple[Settlement, ...]]] = deque(maxlen=_MAX_PENDING)
        self._news = anyio.Event()
        self._pause = 0.0
        self._down_until = 0.0
        self.failures_total = 0

    @property
    def held(self) -> Mapping[str, int]:
        held: dict[str, int] = {}
        for charges in self._leases.values():
            for charge in charges:
                held[charge.key] = held.get(charge.key, 0) + charge.amount
        return held

    async def take(self, holder: str, charges: Sequence[Charge], now: float) -> Taken:
        if not charges:
            return Taken()
        arguments: list[Any] = [holder, int(_LEASE_SECONDS * 1000)]
        for charge in charges:
            kind = "held" if charge.window_seconds is None else "rate"
            rate = rate_per_second(charge) / 1000
            arguments += [kind, charge.amount, repr(rate), charge.capacity]
        answer = await self._ask(TAKE, [self._key(charge) for charge in charges], arguments)
        if answer is None:
            self._forget(holder, charges)
            return self._without_redis()
        refused, *used = answer
        states = tuple(map(LimitState, charges, map(float, used)))
        if refused:
            state = states[int(refused) - 1]
            return Taken(states, state.charge, wait_seconds(state.charge, state.used))
        held = [charge for charge in charges if charge.window_seconds is None]
        if held:
            self._leases.setdefault(holder, []).extend(held)
        return Taken(states)

    def settle(self, holder: str, settlements: Sequence[Settlement], now: float) -> None:
        for settlement in settlements:
            leases = self._leases.get(holder, [])
            if settlement.charge in leases:
                leases.remove(settlement.charge)
        if not self._leases.get(holder, True):
            del self._leases[holder]
        due = tuple(
            each for each in settlements if each.charge.window_seconds is None or each.refund
        )
        if due:
            self._pending.append((holder, due))
            self._news.set()

    async def run(self) -> None:
        """Send what was given back and renew leases, until cancelled."""
        try:
            renew_at = self._now() + _RENEW_SECONDS
            while True:
                with anyio.move_on_after(max(0.0, renew_at - self._now())):
                    await self._news.wait()
                self._news = anyio.Event()
                while self._pending:
                    await self._send_pending()
                if self._now() >= renew_at:
                    renew_at = self._now() + _RENEW_SECONDS
                    await self.renew()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                while self._pending and self._now() >= self._down_until:
                    await self._send_pending()
                await self._client.aclose()

    async def _send_pending(self) -> None:
        """Send one batch; where Redis is not there, wait, and keep only what may be sent twice."""
        batch = [self._pending.popleft() for _ in range(min(_MAX_BATCH, len(self._pending)))]
        keys: list[str] = []
        arguments: list[Any] = []
        for holder, settlements in batch:
            for each in settlements:
                charge = each.charge
                kind = "held" if charge.window_seconds is None else "rate"
                amount = charge.amount if kind == "held" else repr(each.refund)
                keys.append(self._key(charge))
                arguments += [kind, holder, amount, repr(rate_per_second(charge) / 1000)]
        if await self._ask(SETTLE, keys, arguments) is not None:
            return
        for holder, settlements in reversed(batch):
            held = tuple(each for each in settlements if each.charge.window_seconds is None)
            if held and len(self._pending) < _MAX_PENDING:
                self._pending.appendleft((holder, held))
        await anyio.sleep(max(0.01, self._down_until - self._now()))

    async def renew(self) -> None:
        """Tell Redis, which may be a new one, what is held here, for as long as a lease again."""
        keys: list[str] = []
        arguments: list[Any] = [int(_LEASE_SECONDS * 1000)]
        for holder, charges in self._leases.items():
            for charge in charges:
                keys.append(self._key(charge))
                arguments += [holder, charge.amount]
        if keys:
            await self._ask(RENEW, keys, arguments)

    async def _ask(self, script: str, keys: list[str], arguments: list[Any]) -> Any | None:
        """Return a script's answer; None where Redis did not give one, or is left alone for now."""
        from redis.exceptions import RedisError

        if self._now() < self._down_until:
            return None
        try:
            with anyio.fail_after(self._settings.timeout_seconds):
                answer = await self._scripts[script](keys=keys, args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            return None
        if self._pause:
            _logger.info("limit store is back")
            self._pause = 0.0
        return answer

    def _failed(self, error: Exception) -> None:
        self.failures_total += 1
        self._pause = min(max(_FIRST_PAUSE_SECONDS, 2 * self._pause), _LONGEST_PAUSE_SECONDS)
        self._down_until = self._now() + self._pause
        _logger.warning(
            "limit store does not answer",
            reason=f"{type(error).__name__}: {error}",
            asked_again_after=self._pause,
            requests="let in without limits" if self._settings.fails_open else "refused",
        )

    def _forget(self, holder: str, charges: Sequence[Charge]) -> None:
        """Free what a script may have taken whose answer did not come."""
        held = [Settlement(charge) for charge in charges if charge.window_seconds is None]
        if held:
            self.settle(holder, held, self._now())

    def _without_redis(self) -> Taken:
        if self._settings.fails_open:
            return Taken(charged=False)
        raise Unavailable(
            "the limits of API keys cannot be checked, and so no request is let in; wait and send again",
            retry_after_seconds=max(1.0, self._down_until - self._now()),
            reason="limit_store",
        )

    def _key(self, charge: Charge) -> str:
        """Return the key; the braces put all of a deployment's in one slot, which one script needs."""
        return f"{{{self._settings.key_prefix}}}:{charge.key}"
