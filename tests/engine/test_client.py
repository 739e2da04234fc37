"""A consumer cannot tell an engine in a thread from one in a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.client import EngineClient, ProcessEngine, RestartRule, ThreadEngine
from headrace.engine.streams import SLICE_EVENTS, slices
from headrace.errors import EngineFailed, InvalidRequest, RemoteError, RequestError, Unavailable
from headrace.testing.driving import collect, plain_request, run_bounded, started, until
from headrace.testing.fake_engine import FAILING_TOKEN, build_fake
from headrace.testing.fake_worker import FAKE_WORKER
from headrace.types import EngineStats, StepEvents, TokenEvent

MakeClient = Callable[..., EngineClient]
IMPATIENT = RestartRule(first_delay_seconds=0.01, max_delay_seconds=0.02)


def thread_engine(**options: Any) -> EngineClient:
    return ThreadEngine("t-0", lambda report: build_fake(options, report=report))


def process_engine(**options: Any) -> EngineClient:
    return ProcessEngine("p-0", options, command=FAKE_WORKER, restarts=IMPATIENT)


@pytest.fixture(params=[thread_engine, process_engine])
def make(request: pytest.FixtureRequest) -> MakeClient:
    made: MakeClient = request.param
    return made


def test_a_request_streams_all_its_tokens_and_ends(make: MakeClient) -> None:
    async def main() -> None:
        client = make(name="x")
        states: list[str] = [client.state]
        async with started(client):
            states.append(client.state)
            assert client.card is not None
            assert client.card.name == "x" and client.failure is None
            events = await collect(client, plain_request(max_tokens=40, n=2))
            for choice in (0, 1):
                own = [event for event in events if event.index == choice]
                assert [token for event in own for token in event.token_ids] == [*range(1, 41)]
                assert own[-1].finish_reason == "length" and own[-1].usage is not None
            await until(lambda: client.stats.num_running == 0)
            assert client.stats.generation_tokens_total == 80
        assert [*states, client.state] == ["starting", "ready", "stopped"]

    run_bounded(main())


def test_a_refusal_is_raised_on_entering_as_the_engine_said_it(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make()) as client:
            with pytest.raises(RemoteError, match="token 0 is refused") as refusal:
                await collect(client, plain_request(token=0))
            assert refusal.value.info().param == "prompt"
            assert len(await collect(client, plain_request(max_tokens=1))) == 1

    run_bounded(main())


def test_a_request_that_cannot_travel_is_the_callers_fault() -> None:
    async def main() -> None:
        async with started(process_engine()) as client:
            with pytest.raises(InvalidRequest, match="cannot be sent"):
                await collect(client, plain_request(salt="\ud800"))
            assert len(await collect(client, plain_request(max_tokens=1))) == 1

    run_bounded(main())


def test_leaving_early_aborts_and_the_same_id_can_come_again(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make(step_seconds=0.001, max_running=1)) as client:
            for _ in range(3):
                async with client.stream(plain_request(max_tokens=100_000)) as events:
                    first = await anext(events)
                    assert first[0].token_ids[0] == 1
            events_of_last = await collect(client, plain_request(max_tokens=2))
            assert [token for event in events_of_last for token in event.token_ids] == [1, 2]
            await until(lambda: client.stats.num_running + client.stats.num_waiting == 0)
            assert client.stats.num_free_blocks == client.stats.num_blocks

    run_bounded(main())


def test_a_queued_request_whose_caller_leaves_is_never_run(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make(step_seconds=0.002, max_running=1)) as client:
            async with client.stream(plain_request("long", max_tokens=100_000)) as events:
                await anext(events)
                waiting = [
                    asyncio.create_task(collect(client, plain_request(f"q{i}"))) for i in range(9)
                ]
                await until(lambda: client.stats.num_waiting == 9)
                for task in waiting:
                    task.cancel()
                await until(lambda: client.stats.num_waiting == 0)
                assert client.stats.num_running == 1

    run_bounded(main())


def test_a_caller_cancelled_before_the_answer_leaves_nothing_behind(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make(step_seconds=0.1)) as client:
            async with client.stream(plain_request("other", max_tokens=100)) as events:
                await anext(events)
                task = asyncio.create_task(
                    collect(client, plain_request("gone", max_tokens=100_000))
                )
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await anext(events)
                await anext(events)
                assert client.stats.num_running == 1 and client.stats.num_waiting == 0

    run_bounded(main())


def test_two_live_requests_with_one_id_do_not_mix(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make(step_seconds=0.002)) as client:
            async with client.stream(plain_request("same", max_tokens=20)) as events:
                with pytest.raises(InvalidRequest, match="'same' is already running"):
                    await collect(client, plain_request("same"))
                tokens = [token async for some in events for token in some[0].token_ids]
            assert tokens == [*range(1, 21)]
            assert client.stats.num_running >= 0

    run_bounded(main())


def test_events_merge_while_nobody_reads_and_others_are_not_delayed(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make(step_seconds=0.001)) as client:
            async with client.stream(plain_request("slow", max_tokens=50, n=2)) as slow:
                quick = await collect(client, plain_request("quick", max_tokens=60))
                assert len(quick) > 30
                (merged,) = [some async for some in slow]
            assert [event.index for event in merged] == [0, 1]
            assert [event.token_ids for event in merged] == [[*range(1, 51)]] * 2

    run_bounded(main())


def test_a_failing_step_ends_only_with_an_error_event(make: MakeClient) -> None:
    async def main() -> None:
        async with started(make()) as client:
            events = await collect(client, plain_request(token=FAILING_TOKEN, max_tokens=9))
            assert events[-1].finish_reason == "error" and events[-1].error is not None
            assert client.state == "ready"
            assert len(await collect(client, plain_request(max_tokens=1))) == 1

    run_bounded(main())


def test_nothing_is_accepted_before_ready_or_after_close(make: MakeClient) -> None:
    async def main() -> None:
        client = make()
        with pytest.raises(Unavailable, match=r"is starting \(start, 0%\)") as early:
            await collect(client, plain_request())
        assert early.value.retry_after_seconds is not None
        async with started(client):
            pass
        with pytest.raises(Unavailable, match="has stopped"):
            await collect(client, plain_request())
        await client.close()
        unused = make()
        await unused.close()
        with pytest.raises(EngineFailed, match="was stopped"):
            await unused.start()

    run_bounded(main())


def test_closing_ends_running_streams_with_an_error_and_is_quick(make: MakeClient) -> None:
    async def main() -> None:
        client = make(step_seconds=0.002)
        async with started(client):
            task = asyncio.create_task(collect(client, plain_request(max_tokens=100_000)))
            await until(lambda: client.stats.num_running == 1)
            began = time.monotonic()
            await client.close()
            assert time.monotonic() - began < 2
            with pytest.raises(Unavailable, match="stopping"):
                await task

    run_bounded(main())


def test_a_start_that_fails_says_why_and_stays_failed() -> None:
    def build(report: object) -> Any:
        raise InvalidRequest("no such model")

    async def main() -> None:
        client = ThreadEngine("t-0", build)
        with pytest.raises(EngineFailed, match="no such model"):
            await client.start()
        assert client.state == "failed" and client.failure == "no such model"
        with pytest.raises(Unavailable, match="has failed"):
            await collect(client, plain_request())
        await client.close()

    run_bounded(main())


def test_closing_a_thread_that_loads_stops_it_at_its_next_report() -> None:
    ended = []

    def build(report: Callable[[str, float], None]) -> Any:
        try:
            for step in range(10_000):
                time.sleep(0.001)
                report("load", step / 10_000)
        finally:
            ended.append(True)

    async def main() -> None:
        client = ThreadEngine("t-0", build)
        starting = asyncio.create_task(client.start())
        await until(lambda: client.progress.fraction > 0)
        await client.close()
        with pytest.raises(EngineFailed):
            await starting
        assert ended == [True]

    run_bounded(main())


def test_an_engine_that_breaks_in_a_thread_fails_its_requests() -> None:
    async def main() -> None:
        built = build_fake({}, report=lambda stage, fraction: None)

        def lose_device() -> list[TokenEvent]:
            raise RuntimeError("device lost")

        built.engine.step = lose_device  # type: ignore[method-assign]
        built.engine.abort = lambda request_id: False  # type: ignore[method-assign]
        client = ThreadEngine("t-0", lambda report: built)
        await client.start()
        events = await collect(client, plain_request())
        assert events[-1].finish_reason == "error"
        await until(lambda: client.state == "failed")
        assert built.engine.is_closed
        with pytest.raises(RequestError):
            await collect(client, plain_request())
        await client.close()

    run_bounded(main())


def test_much_news_is_handed_on_in_slices() -> None:
    """O02: between two slices the event loop looks at its sockets, so /health does not wait for all."""
    events = [TokenEvent(request_id=str(number)) for number in range(2 * SLICE_EVENTS + 3)]
    stats = EngineStats(steps_total=7)
    whole = StepEvents(events, stats, 0.5)
    parts = list(slices(whole))
    assert all(isinstance(part, StepEvents) for part in parts)
    assert [len(part.events) for part in parts] == [SLICE_EVENTS, SLICE_EVENTS, 3]  # type: ignore[union-attr]
    assert [event for part in parts for event in part.events] == events  # type: ignore[union-attr]
    assert all((part.stats, part.step_seconds) == (stats, 0.5) for part in parts)  # type: ignore[union-attr]
    short = StepEvents(events[:SLICE_EVENTS], stats)
    assert list(slices(short)) == [short]


def test_news_of_many_choices_all_arrives(make: MakeClient) -> None:
    async def main() -> None:
        num_choices = 3 * SLICE_EVENTS
        async with started(make()) as client:
            events = await collect(client, plain_request(max_tokens=5, n=num_choices))
            for choice in range(num_choices):
                own = [event for event in events if event.index == choice]
                assert [token for event in own for token in event.token_ids] == [*range(1, 6)]

    run_bounded(main())
