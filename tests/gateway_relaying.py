"""A gateway whose model other servers serve, and calls to it: what the tests of relay and failover share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from headrace.clock import SystemClock
from headrace.config import GatewayConfig, ReplicaEntry
from headrace.gateway.breaker import BreakerRule, CircuitBreaker
from headrace.gateway.replica import Replica
from headrace.gateway.upstream import Upstream
from headrace.testing.driving import run_bounded
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange
from headrace.testing.fake_upstream import DONE, USAGE, FakeUpstream, delta, streams

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**ASK, "stream": True}
GOOD = streams(delta("Hel"), delta("lo", finish_reason="stop"), USAGE, DONE)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_bounded(main(), 30)


def replica_for(upstream: FakeUpstream, number: int = 0, **keys: Any) -> Replica:
    entry = ReplicaEntry(kind="http", url=upstream.url, model="far", **keys)
    breaker = CircuitBreaker(BreakerRule(max_failures=3, first_open_seconds=30))
    name = f"far-{number}"
    client = Upstream(name, "tiny", entry, breaker, clock=SystemClock(), api_key="sk-up")
    return Replica(name, "tiny", client, entry, breaker)


@asynccontextmanager
async def relaying(
    *upstreams: FakeUpstream, engines: int = 0, api_keys: str = "", **keys: Any
) -> AsyncIterator[FakeGateway]:
    """A gateway whose model these servers serve, and as many engines of its own.

    `api_keys` are tenant:key with commas between; "": nobody needs one.
    """
    gateway = FakeGateway(
        *[FakeClient(f"tiny/{number}") for number in range(engines)],
        config=GatewayConfig(api_keys_env="KEYS" if api_keys else ""),
        environ={"KEYS": api_keys},
    )
    here = gateway.router.replicas()[:engines]
    there = []
    for number, upstream in enumerate(upstreams):
        await upstream.__aenter__()
        there.append(replica_for(upstream, number, **keys))
    gateway.router.set_replicas("tiny", [*there, *here])
    await asyncio.gather(*(replica.client.start() for replica in there))
    try:
        yield gateway
    finally:
        await asyncio.gather(*(replica.client.close() for replica in there))
        await asyncio.gather(*(upstream.stop() for upstream in upstreams))
        gateway.state.observers.close()
    assert gateway.state.admission.num_tickets == 0
    assert all(gateway.router.ledger.load(each.id).num_requests == 0 for each in there)


async def ask(gateway: FakeGateway, body: object = ASK, **headers: str) -> RawExchange:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await RawExchange(gateway.app, CHAT, body, headers=named).start().finished()
