"""A call handed to another server and back: real sockets, an upstream that says what a test writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_relaying import ASK, CHAT, GOOD, STREAMED, ask, relaying, run

from headrace.gateway.relay_events import MAX_EVENT_BYTES
from headrace.gateway.upstream import Upstream
from headrace.testing.fake_gateway import RawExchange, parse_events, until
from headrace.testing.fake_upstream import (
    DONE,
    FakeUpstream,
    answers_json,
    breaks,
    delta,
    event,
    silent,
    streams,
    whole,
)


def test_an_answer_in_one_piece_comes_back_under_our_name() -> None:
    async def main() -> None:
        upstream = FakeUpstream(answers_json(whole("hello")))
        async with relaying(upstream) as gateway:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            answer = await ask(gateway, x_request_id="mine", traceparent=trace, authorization="no")
            assert answer.status == 200 and answer.json() == whole("hello", model="tiny")
            (received,) = upstream.received
            assert received.json() == {**ASK, "model": "far"}
            assert received.headers["authorization"] == "bearer sk-up"
            assert received.headers["x-request-id"] == "mine"
            assert received.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c")
            assert "connection" not in received.headers or received.headers["connection"] != "close"
            (summary,) = gateway.metrics.finished
            assert (summary.prompt_tokens, summary.completion_tokens) == (5, 2)
            assert summary.finish_reasons == ("stop",) and summary.model == "tiny"

    run(main)


@pytest.mark.parametrize("asked", [False, True])
def test_a_stream_comes_through_and_usage_only_where_it_was_asked_for(asked: bool) -> None:
    """S09: the relay asks for usage always, and keeps it to itself where the client did not."""

    async def main() -> None:
        async with relaying(FakeUpstream(GOOD)) as gateway:
            options = {"stream_options": {"include_usage": True}} if asked else {}
            answer = await ask(gateway, {**STREAMED, **options})
            events = parse_events(answer.body)
            texts = [each["choices"][0]["delta"]["content"] for each in events[:2]]
            assert texts == ["Hel", "lo"] and events[0]["model"] == "tiny"
            assert len(events) == (4 if asked else 3) and events[-1] == "[DONE]"
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert gateway.metrics.finished[0].completion_tokens == 2

    run(main)


def test_a_refusal_at_once_is_no_torn_stream() -> None:
    """S13: A answers 503 at once and B is well; the client gets a normal stream from B."""

    async def main() -> None:
        bad, good = FakeUpstream(answers_json({}, status=503)), FakeUpstream(GOOD)
        async with relaying(bad, good) as gateway:
            for _ in range(4):
                answer = await ask(gateway, STREAMED)
                assert answer.status == 200 and parse_events(answer.body)[-1] == "[DONE]"
            assert len(good.received) == 4 and len(bad.received) >= 1

    run(main)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
def test_a_callers_mistake_comes_back_as_it_is(status: int) -> None:
    """R01, S13: 50 bad prompts open no breaker and are sent nowhere else; 429 keeps its Retry-After."""

    async def main() -> None:
        problem = {"error": {"message": "too long", "code": "context_length_exceeded"}}
        upstream, other = (
            FakeUpstream(answers_json(problem, status=status, headers=["retry-after: 7"]))
            for _ in range(2)
        )
        async with relaying(upstream, other) as gateway:
            for number in range(50):
                answer = await ask(gateway, STREAMED if number % 2 else ASK)
                assert (answer.status, answer.json()) == (status, problem)
                assert answer.headers["retry-after"] == "7"
            assert len(upstream.received) + len(other.received) == 50
            upstream.answer = other.answer = answers_json(whole("good"))
            assert (await ask(gateway)).status == 200

    run(main)


def test_dead_replicas_are_left_alone_and_come_back() -> None:
    async def main() -> None:
        bad, good = FakeUpstream(breaks), FakeUpstream(answers_json(whole("x")))
        async with relaying(bad, good) as gateway:
            for _ in range(12):
                assert (await ask(gateway)).status == 200
            first = gateway.router.replicas()[0]
            assert first.state == "failed" and not first.can_serve(gateway.state.clock.now())
            tried = len(bad.received)
            for _ in range(6):
                assert (await ask(gateway)).status == 200
            assert len(bad.received) == tried
            bad.answer = good.answer
            await until(
                lambda: first.can_serve(gateway.state.clock.now())
            )  # a probe ended the rest
            while not first.is_ready:
                assert (await ask(gateway)).status == 200

    run(main)


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "stream"])
def test_with_nobody_left_the_last_failure_is_the_answer(body: dict[str, Any]) -> None:
    async def main() -> None:
        problem = {"error": {"message": "no memory", "code": "oom"}}
        async with relaying(
            FakeUpstream(breaks), FakeUpstream(answers_json(problem, status=500))
        ) as gateway:
            statuses = set()
            for _ in range(2):
                answer = await ask(gateway, body)
                statuses.add(answer.status)
                assert "error" in answer.json()
            assert statuses <= {500, 502}

    run(main)


def test_after_the_first_event_there_is_one_error_event_and_no_second_try() -> None:
    """R07, S12: no replay, no [DONE], no finish reason; zero bytes out and it is tried elsewhere."""

    async def main() -> None:
        torn = streams(delta("Hel"), ends=False)
        first, second = FakeUpstream(torn), FakeUpstream(torn)
        async with relaying(first, second) as gateway:
            answer = await ask(gateway, STREAMED)
            said, error = parse_events(answer.body)
            assert said["choices"][0]["delta"]["content"] == "Hel"
            assert error["error"]["code"] == "upstream_failed" and answer.is_complete
            assert len(first.received) + len(second.received) == 1
            assert gateway.metrics.finished[0].status == 502
            first.answer = streams(ends=False)
            second.answer = GOOD
            for _ in range(2):
                answer = await ask(gateway, STREAMED)
                assert parse_events(answer.body)[-1] == "[DONE]"

    run(main)


def test_an_error_event_of_theirs_is_the_only_one() -> None:
    async def main() -> None:
        told = event({"error": {"message": "died", "code": "engine_failed"}})
        async with relaying(FakeUpstream(streams(delta("a"), 0.05, told))) as gateway:
            answer = await ask(gateway, STREAMED)
            events = parse_events(answer.body)
            assert [("error" in each) for each in events] == [False, True]
            assert gateway.metrics.finished[0].status == 502

    run(main)


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        ({"first_byte_timeout": 0.1}, silent),
        ({"first_byte_timeout": 0.1}, streams(10.0)),
        ({"idle_timeout": 0.1}, streams(delta("a"), 10.0)),
    ],
    ids=["no head", "no body", "a pause"],
)
def test_silence_is_bounded(keys: dict[str, Any], answer: Any) -> None:
    async def main() -> None:
        async with relaying(FakeUpstream(answer), **keys) as gateway:
            got = await ask(gateway, STREAMED)
            last = parse_events(got.body)[-1] if got.status == 200 else got.json()
            assert last["error"]["code"] == "upstream_timeout"
            assert gateway.metrics.finished[0].status == 504

    run(main)


def test_a_slow_stream_within_its_bounds_is_left_alone() -> None:
    async def main() -> None:
        pieces = [piece for _ in range(6) for piece in (delta("a"), 0.1)]
        slow = streams(0.1, *pieces, DONE)
        async with relaying(
            FakeUpstream(slow), first_byte_timeout=0.4, idle_timeout=0.4
        ) as gateway:
            assert parse_events((await ask(gateway, STREAMED)).body)[-1] == "[DONE]"

    run(main)


def test_an_event_without_an_end_ends_with_an_error() -> None:
    """S17: flat memory, one error event."""

    async def main() -> None:
        flood = streams(delta("a"), *[b"x" * (1 << 20)] * (3 * MAX_EVENT_BYTES >> 20))
        async with relaying(FakeUpstream(flood)) as gateway:
            answer = await ask(gateway, STREAMED)
            assert parse_events(answer.body)[-1]["error"]["code"] == "upstream_failed"
            assert len(answer.body) < 10_000

    run(main)


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_the_exchange(body: dict[str, Any]) -> None:
    """S11: the other server sees the disconnect, streamed or not."""

    async def main() -> None:
        upstream = FakeUpstream(silent if body is ASK else streams(delta("a"), 3600.0))
        async with relaying(upstream) as gateway:
            exchange = RawExchange(gateway.app, CHAT, body).start()
            await until(lambda: upstream.received)
            exchange.disconnect()
            await exchange.finished()
            await until(lambda: upstream.num_left == 1)
            assert gateway.metrics.finished[0].status == 499

    run(main)


def test_a_dead_server_frees_who_waits_for_its_first_byte() -> None:
    async def main() -> None:
        bad, good = FakeUpstream(silent), FakeUpstream(answers_json(whole("x")))
        async with relaying(bad, good) as gateway:
            waiting = [RawExchange(gateway.app, CHAT, ASK).start() for _ in range(4)]
            await until(lambda: bad.received)
            client = gateway.router.replicas()[0].client
            assert isinstance(client, Upstream)
            for _ in range(3):
                client.take_probe("no answer")
            answers = [await exchange.finished() for exchange in waiting]
            assert [answer.status for answer in answers] == [200] * 4

    run(main)


def test_a_kept_connection_that_was_closed_costs_nobody_an_answer() -> None:
    async def closes(received: Any, writer: asyncio.StreamWriter) -> None:
        await answers_json(whole("x"))(received, writer)
        await writer.drain()
        writer.close()

    async def main() -> None:
        upstream = FakeUpstream(closes)
        async with relaying(upstream) as gateway:
            for _ in range(20):
                assert (await ask(gateway)).status == 200

    run(main)


def test_a_key_that_they_refuse_is_our_fault() -> None:
    async def main() -> None:
        async with relaying(FakeUpstream(answers_json({}, status=401))) as gateway:
            answer = await ask(gateway)
            assert answer.status == 502
            assert answer.json()["error"]["code"] == "upstream_refused_key"
            assert "sk-up" not in answer.body.decode()

    run(main)


def test_engines_and_other_servers_serve_one_model() -> None:
    """Tokenized for routing; the other server gets the body as it came."""

    async def main() -> None:
        upstream = FakeUpstream(answers_json(whole("there")))
        async with relaying(upstream, engines=1) as gateway:
            texts = []
            for _ in range(6):
                answer = (await ask(gateway)).json()
                texts.append(answer["choices"][0]["message"]["content"])
            assert sorted(texts) == ["Hello world"] * 3 + ["there"] * 3
            assert upstream.received[0].json() == {**ASK, "model": "far"}
            upstream.answer = breaks
            for body in (ASK, STREAMED):
                for _ in range(2):
                    assert (await ask(gateway, body)).status == 200
            gateway.engine.fails_after = 0
            for body, good in ((ASK, answers_json(whole("there"))), (STREAMED, GOOD)):
                upstream.answer = good
                assert (await ask(gateway, body)).status == 200

    run(main)


def test_models_that_run_elsewhere_are_listed_and_their_tokens_are_not_counted() -> None:
    async def main() -> None:
        async with relaying(FakeUpstream()) as gateway:
            listing = RawExchange(gateway.app, "/v1/models", b"", method="GET").start()
            (model,) = (await listing.finished()).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("tiny", 99)
            body = {"model": "tiny", "prompt": "x"}
            refused = await RawExchange(gateway.app, "/tokenize", body).start().finished()
            assert refused.status == 400 and "another server" in refused.body.decode()

    run(main)


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    async def main() -> None:
        upstream = FakeUpstream()
        upstream.is_healthy = False
        async with relaying(upstream) as gateway:
            assert (await ask(gateway)).status == 503
            upstream.is_healthy = True
            await until(lambda: gateway.router.replicas()[0].is_ready)
            assert (await ask(gateway)).status == 200

    run(main)
