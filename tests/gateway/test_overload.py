"""More than the server can do: bounded queues, quick refusals, nobody served who has left, nothing kept."""

from __future__ import annotations

import asyncio
import gc
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from gateway_server import Served

from headrace.clock import SystemClock
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway, RawExchange, until

REGISTRIES = Registries.from_manager(create_plugin_manager(discover=False))
CHAT = "/v1/chat/completions"
USER: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}


def make(name: str, **options: Any) -> Any:
    return REGISTRIES.create("admission", name, options, pathlib.Path())


def small_gateway(*policies: Any, num_blocks: int = 3) -> FakeGateway:
    """A gateway whose replica has room for one or two requests."""
    return FakeGateway(FakeClient(card=fake_card(num_blocks=num_blocks)), admission=policies)


def test_a_queued_request_whose_caller_left_never_reaches_an_engine() -> None:
    """O04: 100 wait, 90 give up; only the others are served, and nothing is left of any."""

    async def main() -> None:
        gateway = small_gateway(make("kv_footprint", max_wait="10m"))
        gateway.engine.may_step.clear()
        running = RawExchange(gateway.app, CHAT, USER).start()
        await until(lambda: gateway.engine.requests)
        waiting = [RawExchange(gateway.app, CHAT, USER).start() for _ in range(100)]
        await until(lambda: gateway.state.admission.num_waiting == 100)
        for exchange in waiting[:90]:
            exchange.disconnect()
        for exchange in waiting[:90]:
            await exchange.finished()
        assert gateway.state.admission.num_waiting == 10
        gateway.engine.may_step.set()
        for exchange in [running, *waiting[90:]]:
            assert (await exchange.finished()).status == 200
        assert len(gateway.engine.requests) == 11
        gateway.assert_idle()

    asyncio.run(main())


def test_waiting_requests_are_served_in_turn() -> None:
    async def main() -> None:
        gateway = small_gateway(make("kv_footprint", max_wait="10m"))
        exchanges = [RawExchange(gateway.app, CHAT, USER).start() for _ in range(60)]
        for exchange in exchanges:
            assert (await exchange.finished()).status == 200
        assert len(gateway.engine.requests) == 60
        gateway.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["answer", "engine fails", "leaves", "bad body", "refused"])
def test_limits_are_settled_however_a_request_ends(how: str) -> None:
    """O05: the place is free again, and tokens are charged as far as they were produced."""

    async def main() -> None:
        gateway = small_gateway(
            make("token_bucket", concurrency=1, tokens_per_minute=1000), num_blocks=64
        )
        engine = gateway.engine
        if how == "engine fails":
            engine.fails_after = 0
        if how == "refused":
            from headrace.errors import Unavailable

            engine.refusal = Unavailable("full", retry_after_seconds=1.0)
        if how == "leaves":
            engine.may_step.clear()
        body: object = b"{" if how == "bad body" else USER
        exchange = RawExchange(gateway.app, CHAT, body).start()
        if how == "leaves":
            await until(lambda: engine.requests)
            exchange.disconnect()
        await exchange.finished()
        gateway.assert_idle()
        engine.fails_after, engine.refusal = None, None
        engine.may_step.set()
        after = await RawExchange(gateway.app, CHAT, USER).start().finished()
        assert after.status == 200
        prompt = len(engine.requests[-1].prompt_token_ids)
        used = {"answer": prompt + 3, "leaves": prompt}.get(how, 0)
        left = int(after.headers["x-ratelimit-remaining-tokens"])
        assert left in (1000 - used - prompt - 16, 1000 - used - prompt - 15)

    asyncio.run(main())


def test_who_sets_no_bound_reserves_what_is_expected() -> None:
    """Most clients leave max_tokens out: the whole context for each would fit no bucket."""

    async def main() -> None:
        gateway = FakeGateway(admission=[make("token_bucket", tokens_per_minute=240)])
        body = {"messages": USER["messages"]}  # of 256 tokens of context
        answer = await RawExchange(gateway.app, CHAT, body).start().finished()
        assert answer.status == 200
        prompt = len(gateway.engine.requests[0].prompt_token_ids)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left == 240 - prompt - 128
        asked = {**body, "max_tokens": 255 - prompt}
        refused = await RawExchange(gateway.app, CHAT, asked).start().finished()
        assert refused.json()["error"]["reason"] == "request_too_large"

    asyncio.run(main())


def test_answers_say_what_is_left() -> None:
    async def main() -> None:
        gateway = FakeGateway(
            admission=[make("token_bucket", requests_per_minute=2, tokens_per_minute=6000)]
        )
        for left in (1, 0):
            for_stream = {**USER, "stream": bool(left)}
            answer = await RawExchange(gateway.app, CHAT, for_stream).start().finished()
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
        refused = await RawExchange(gateway.app, CHAT, USER).start().finished()
        error = refused.json()["error"]
        assert (refused.status, error["code"], error["reason"]) == (
            429,
            "rate_limit_exceeded",
            "requests",
        )
        assert 28 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].startswith("59") or (
            refused.headers["x-ratelimit-reset-requests"] == "1m0s"
        )

    asyncio.run(main())


@pytest.fixture
def limited() -> Iterator[Served]:
    gateway = FakeGateway(
        admission=[
            make("token_bucket", requests_per_minute=60, requests_burst=1, tokens_per_minute=90)
        ]
    )
    served = Served(gateway=gateway)
    yield served
    served.close()


def test_the_sdk_waits_as_long_as_it_is_told(limited: Served) -> None:
    """O09: one layer of retries: Retry-After is obeyed, and each try is one attempt at most."""
    url = f"http://127.0.0.1:{limited.port}/v1"
    messages: Any = USER["messages"]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=2) as sdk:
        for _ in range(2):  # the second finds the bucket empty, and full again a second later
            answer = sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
            assert answer.choices[0].finish_reason in ("stop", "length")
        assert len(limited.gateway.engine.requests) == 2
        tried = limited.gateway.state.admission.refusals["requests"]
        assert 1 <= tried <= 2
        time.sleep(1.0)
        with pytest.raises(openai.RateLimitError) as refusal:
            sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=200)
        assert refusal.value.body["reason"] == "request_too_large"  # type: ignore[index]
        assert len(limited.gateway.engine.requests) == 2
        assert limited.gateway.state.admission.refusals["request_too_large"] == 1, "not tried again"


def test_the_sdk_sees_503_for_overload(limited: Served) -> None:
    """O09: 503 is ours; the gateway itself tries nothing again."""
    gateway = limited.gateway
    gateway.state.admission._policies = (make("kv_footprint", max_queued_requests=0),)
    gateway.engine.card_when_ready = fake_card(num_blocks=1)
    gateway.engine.become_ready()
    gateway.engine.may_step.clear()
    url = f"http://127.0.0.1:{limited.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        stream = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        first = stream.chat.completions.create(model="tiny", messages=USER["messages"], stream=True)
        with pytest.raises(openai.InternalServerError) as refusal:
            sdk.chat.completions.create(model="tiny", messages=USER["messages"])
        assert refusal.value.status_code == 503
        assert refusal.value.response.headers["retry-after"] == "1"
        assert refusal.value.body["reason"] == "queue_full"  # type: ignore[index]
        assert len(gateway.engine.requests) == 1
        first.close()
        stream.close()


async def overload(gateway: FakeGateway, seconds: float) -> dict[int | None, list[float]]:
    """Send ten times what the engine can do; return the seconds each answer took, by status."""
    times: dict[int | None, list[float]] = {}

    async def one() -> None:
        start = time.perf_counter()
        exchange = await RawExchange(gateway.app, CHAT, USER).start().finished()
        times.setdefault(exchange.status, []).append(time.perf_counter() - start)

    end = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() < end:
            for _ in range(10):
                group.create_task(one())
            await asyncio.sleep(0.1)
    return times


def overloaded(seconds: float) -> dict[int | None, list[float]]:
    gateway = small_gateway(
        make("kv_footprint", max_wait="1s", max_queued_requests=8), num_blocks=4
    )
    gateway.engine.step_seconds = 0.07  # two requests at a time, three steps each: 9.5 a second
    asyncio.run(overload(gateway, 1.0))
    gc.collect()
    before = psutil.Process().memory_info().rss
    gateway.metrics.finished.clear()
    gateway.observed.clear()
    num_before = len(gateway.engine.requests)
    times = asyncio.run(overload(gateway, seconds))
    gateway.metrics.finished.clear()
    gateway.observed.clear()
    num_reached = len(gateway.engine.requests)
    gateway.engine.requests.clear()
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert set(times) == {200, 503}
    assert len(times[503]) > 3 * len(times[200]) > 0
    assert num_reached == len(times[200]) + num_before, "no engine heard of who was refused"
    refusals = gateway.state.admission.refusals
    assert set(refusals) <= {"queue_full", "predicted_wait", "queue_timeout"}
    assert refusals["queue_timeout"] < sum(refusals.values()) / 4, "most are refused at once"
    assert grown < 40 << 20
    gateway.assert_idle()
    return times


def test_three_seconds_of_overload() -> None:
    """O01: ten times the capacity: refused at once or served in time, and memory stays flat."""
    overloaded(3.0)


@pytest.mark.slow
def test_two_minutes_of_overload() -> None:
    """O01: the same for long; refusals cost milliseconds and who came in is served in time."""
    times = overloaded(120.0)
    served, refused = sorted(times[200]), sorted(times[503])
    assert served[len(served) * 9 // 10] < 1.0 + 5.0, "at most max_wait and his own time"
    assert refused[len(refused) // 2] < 0.1


def test_the_clock_of_waiting_is_the_gateways() -> None:
    """A wait that is over by the gateway's clock ends with 503 and its reason."""

    async def main() -> None:
        gateway = small_gateway(make("kv_footprint", max_wait="50ms"))
        assert isinstance(gateway.state.clock, SystemClock)
        gateway.engine.may_step.clear()
        first = RawExchange(gateway.app, CHAT, USER).start()
        await until(lambda: gateway.engine.requests)
        late = await RawExchange(gateway.app, CHAT, USER).start().finished()
        assert late.status == 503 and late.json()["error"]["reason"] == "queue_timeout"
        gateway.engine.may_step.set()
        await first.finished()
        gateway.assert_idle()

    asyncio.run(main())
