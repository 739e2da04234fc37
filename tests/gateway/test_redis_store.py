"""Limits in a real Redis: the same rules as in memory, shared by gateways, and what happens without it."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import anyio
import pytest

from headrace.clock import SystemClock
from headrace.errors import Unavailable
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.limit_store import Settlement
from headrace.gateway.redis_store import RedisLimitStore, RedisSettings
from headrace.testing.fake_gateway import FakeGateway, RawExchange, until
from headrace.testing.redis_server import RedisServer
from headrace.types import AdmissionView, Admit, Charge, TicketView

pytestmark = pytest.mark.skipif(
    not RedisServer.is_installed(), reason="redis-server is not installed"
)
HELD = Charge("concurrency/a", 1, 2)
RATE = Charge("tokens/a", 100, 250, 600.0, unit="tokens")
CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def redis_server(tmp_path: pathlib.Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path).start()
    yield server
    server.kill()


@asynccontextmanager
async def stores(
    server: RedisServer, count: int = 1, *, fails_open: bool = True
) -> AsyncIterator[list[RedisLimitStore]]:
    """Stores of that many gateways, each with its work in the background."""
    settings = RedisSettings(server.url, fails_open, timeout_seconds=5.0)
    made = [RedisLimitStore(settings, SystemClock().now) for _ in range(count)]
    async with anyio.create_task_group() as group:
        for store in made:
            group.start_soon(store.run)
        yield made
        group.cancel_scope.cancel()


async def becomes(question: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await question():  # noqa: ASYNC110 - another process has no event for us
            await asyncio.sleep(0.01)


def test_two_gateways_share_rates_and_places(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with stores(redis_server, 2) as (one, two):
            first = await one.take("1", [HELD, RATE], 0.0)
            assert first.refused is None
            assert [state.remaining for state in first.states] == [1, 150]
            second = await two.take("2", [HELD, RATE], 0.0)
            assert second.refused is None and second.states[1].remaining <= 51
            third = await one.take("3", [HELD, RATE], 0.0)
            assert third.refused == HELD and third.retry_after_seconds == 1.0
            assert third.states[0].used == 2
            fourth = await one.take("4", [RATE], 0.0)
            assert fourth.refused == RATE
            assert 100 < fourth.retry_after_seconds <= 120
            two.settle("2", [Settlement(HELD), Settlement(RATE, refund=100)], 0.0)

            async def has_room() -> bool:
                return (await one.take("5", [HELD, RATE], 0.0)).refused is None

            await becomes(has_room)
            assert one.held == {HELD.key: 2} and two.held == {}

    asyncio.run(main())


def test_a_place_is_given_back_once_however_often_it_is_said(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with stores(redis_server) as (store,):
            for holder in ("1", "2"):
                assert (await store.take(holder, [HELD], 0.0)).refused is None
            for _ in range(3):
                store.settle("1", [Settlement(HELD)], 0.0)

            async def one_free() -> bool:
                return (await store.take("3", [HELD], 0.0)).refused is None

            await becomes(one_free)
            assert (await store.take("4", [HELD], 0.0)).refused == HELD

    asyncio.run(main())


def test_every_key_expires(redis_server: RedisServer) -> None:
    async def main() -> None:
        import redis.asyncio

        async with stores(redis_server) as (store,):
            await store.take("1", [HELD, RATE], 0.0)
        client = redis.asyncio.from_url(redis_server.url)
        keys = await client.keys("*")
        assert sorted(keys) == [b"{headrace}:concurrency/a", b"{headrace}:tokens/a"]
        assert 30_000 < await client.pttl(keys[0]) and 30_000 < await client.pttl(keys[1])
        assert max([await client.pttl(key) for key in keys]) <= 1000 + 240_000
        await client.aclose()

    asyncio.run(main())


def test_without_redis_everybody_comes_in_and_waits_for_nothing(
    redis_server: RedisServer,
) -> None:
    """Killed and started again: limits hold before, not meanwhile, and again after."""

    async def main() -> None:
        async with stores(redis_server) as (store,):
            for holder in ("1", "2"):
                assert (await store.take(holder, [HELD], 0.0)).charged
            redis_server.kill()
            during = await store.take("3", [HELD], 0.0)
            assert during.refused is None and not during.charged
            assert store.held == {HELD.key: 2}
            failures = store.failures_total
            assert failures == 1
            for _ in range(100):
                await store.take("4", [HELD], 0.0)
            assert store.failures_total <= failures + 3, "a dead Redis is left alone"
            redis_server.start()

            async def counts_again() -> bool:
                return (await store.take("5", [HELD], 0.0)).charged

            async def refuses_again() -> bool:
                return (await store.take("6", [HELD], 0.0)).refused == HELD

            await becomes(counts_again)
            await becomes(refuses_again)

    asyncio.run(main())


def test_a_store_that_fails_closed_refuses(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with stores(redis_server, fails_open=False) as (store,):
            redis_server.kill()
            with pytest.raises(Unavailable, match="cannot be checked") as refusal:
                await store.take("1", [HELD], 0.0)
            assert refusal.value.reason == "limit_store"
            assert (refusal.value.retry_after_seconds or 0) >= 1

    asyncio.run(main())


def test_a_new_redis_learns_what_is_held(redis_server: RedisServer) -> None:
    """A Redis that lost its memory is told of running requests when their leases are renewed."""

    async def main() -> None:
        async with stores(redis_server) as (store,):
            for holder in ("1", "2"):
                await store.take(holder, [HELD], 0.0)
            redis_server.kill()
            redis_server.start()
            await store.renew()
            await store.renew()  # the first may find the connection broken

            async def is_full() -> bool:
                await store.renew()
                return (await store.take("3", [HELD], 0.0)).refused == HELD

            await becomes(is_full)

    asyncio.run(main())


def test_requests_through_two_gateways_with_one_place(redis_server: RedisServer) -> None:
    """O05: of two gateways one serves; when its caller leaves, the other gets the place."""

    class OneAtATime:
        name: ClassVar[str] = "one_at_a_time"

        def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit:
            charge = Charge("concurrency/all", 1, 1)
            return Admit((charge,)) if ticket.stage == "arrival" else Admit()

    async def main() -> None:
        async with stores(redis_server, 2) as pair:
            gateways = [FakeGateway(admission=[OneAtATime()]) for _ in pair]
            for gateway, store in zip(gateways, pair, strict=True):
                assert isinstance(gateway.state.admission, AdmissionGate)
                gateway.state.admission.store = store
            one, two = gateways
            one.engine.may_step.clear()
            first = RawExchange(one.app, CHAT, USER).start()
            await until(lambda: one.engine.requests)
            refused = await RawExchange(two.app, CHAT, USER).start().finished()
            assert refused.status == 429
            assert refused.json()["error"]["reason"] == "concurrency"
            first.disconnect()
            await first.finished()

            async def second_is_served() -> bool:
                exchange = await RawExchange(two.app, CHAT, USER).start().finished()
                return exchange.status == 200

            await becomes(second_is_served)
            await until(lambda: not pair[0].held and not pair[1].held)
            for gateway in gateways:
                gateway.assert_idle()

    asyncio.run(main())
