"""Other servers that do what no server should, and bodies that only look like requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from gateway_relaying import ASK, CHAT, GOOD, STREAMED, ask, relaying, run

from headrace.clock import SystemClock
from headrace.config import ReplicaEntry
from headrace.gateway.breaker import CircuitBreaker
from headrace.gateway.upstream import Upstream
from headrace.policies.admission.token_bucket import TokenBucket
from headrace.testing.fake_gateway import FakeGateway, RawExchange, parse_events, until
from headrace.testing.fake_upstream import (
    DONE,
    JSON,
    USAGE,
    FakeUpstream,
    Received,
    answers_json,
    delta,
    event,
    streams,
    whole,
)

MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"n":2000000000,' + MESSAGES + b"}", "n must be from 1 to 128"),
        (b'{"n":0,' + MESSAGES + b"}", "n must be from 1 to 128"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "UTF-8"),
        (b'{"temperature":1e999,' + MESSAGES + b"}", "out of range"),
        (b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_breaks_its_reader_is_refused_here(body: bytes, named: str) -> None:
    """P02, O01: a choice too many costs memory here, before the other server can refuse it."""

    async def main() -> None:
        upstreams = FakeUpstream(), FakeUpstream()
        async with relaying(*upstreams) as gateway:
            answer = await ask(gateway, body)
            assert answer.status == 400 and named in answer.json()["error"]["message"]
            assert (await ask(gateway)).status == 200
        assert sum(len(upstream.received) for upstream in upstreams) == 1

    run(main)


@pytest.mark.parametrize(
    "usage",
    [
        {"usage": {"prompt_tokens": 5, "completion_tokens": 2}},
        {"choices": None, "usage": {"prompt_tokens": 5}},
        {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": "two"}},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": -1000000}},
    ],
)
def test_no_form_of_usage_reaches_who_did_not_ask(usage: dict[str, Any]) -> None:
    """S09: a client reads choices[0] of every chunk; and no usage takes tokens back from a limit."""

    async def main() -> None:
        told = streams(delta("x", finish_reason="stop"), event(usage), DONE)
        async with relaying(FakeUpstream(told)) as gateway:
            answer = await ask(gateway, STREAMED)
            assert [len(chunk["choices"]) for chunk in parse_events(answer.body)[:-1]] == [1]
            (finished,) = gateway.metrics.finished
            assert finished.completion_tokens >= 0

    run(main)


@pytest.mark.parametrize("pause", [(), (30.0,)])
def test_the_last_event_ends_a_stream_whatever_comes_behind(pause: tuple[float, ...]) -> None:
    async def main() -> None:
        last = DONE if pause else DONE + b": bye\n\n"
        said = streams(delta("x", finish_reason="stop"), USAGE, last, *pause)
        async with relaying(FakeUpstream(said)) as gateway:
            began = time.monotonic()
            answer = await ask(gateway, STREAMED)
            assert time.monotonic() - began < 20
            assert b"error" not in answer.body and answer.body.count(b"[DONE]") == 1

    run(main)


def test_a_sign_of_life_is_no_answer() -> None:
    """S13: a comment during a long prefill does not bind the request to the replica that wrote it."""

    async def main() -> None:
        waits = FakeUpstream(streams(b": still here\n\n", 0.05, ends=False))
        async with relaying(waits, FakeUpstream(GOOD)) as gateway:
            for _ in range(2):
                answer = await ask(gateway, STREAMED)
                assert [part for part in parse_events(answer.body) if "error" in part] == []
                assert b"still here" not in answer.body and answer.body.endswith(DONE)
        assert len(waits.received) >= 1

    run(main)


def test_a_second_server_that_does_not_stream_tears_nothing() -> None:
    async def main() -> None:
        dies = FakeUpstream(streams(ends=False))
        async with relaying(dies, FakeUpstream(answers_json(whole("hi")))) as gateway:
            answers = [await ask(gateway, STREAMED) for _ in range(2)]
            starts = [
                sum(message["type"] == "http.response.start" for message in answer.sent)
                for answer in answers
            ]
            assert starts == [1, 1]
            torn = next(answer for answer in answers if b"error" in answer.body)
            assert [event["error"]["code"] for event in parse_events(torn.body)] == [
                "upstream_failed"
            ]

    run(main)


@pytest.mark.parametrize("value", ["text/x; name=\u4f60", "text/x\x01"])
def test_headers_of_theirs_cannot_break_an_answer(value: str) -> None:
    async def odd(received: Received, writer: asyncio.StreamWriter) -> None:
        lines = ["HTTP/1.1 400 X", f"content-type: {value}", f"retry-after: {value}"]
        lines += ["set-cookie: a=b", "server: theirs", "content-length: 2"]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n{}")

    async def main() -> None:
        async with relaying(FakeUpstream(odd)) as gateway:
            answer = await ask(gateway)
            assert answer.status in (400, 502)
            names = {
                name
                for message in answer.sent
                if message["type"] == "http.response.start"
                for name, _ in message["headers"]
            }
            assert not names & {b"set-cookie", b"server"}
            sent = b"".join(value for m in answer.sent for _, value in m.get("headers", ()))
            assert not any(byte < 32 for byte in sent)

    run(main)


def test_a_status_that_nobody_knows_is_a_failure_of_theirs() -> None:
    async def main() -> None:
        async with relaying(FakeUpstream(answers_json({}, status=999))) as gateway:
            assert (await ask(gateway)).status == 502

    run(main)


def test_what_was_produced_counts_without_usage() -> None:
    """O05: a caller who leaves before the usage comes has used what came."""

    async def main() -> None:
        produced = [delta("x") for _ in range(7)]
        async with relaying(FakeUpstream(streams(*produced, 30.0))) as gateway:
            exchange = RawExchange(gateway.app, CHAT, STREAMED).start()
            await until(lambda: exchange.body.count(b"data:") == 7)
            exchange.disconnect()
            await exchange.finished()
            (finished,) = gateway.metrics.finished
            assert (finished.status, finished.completion_tokens) == (499, 7)

    run(main)


def test_a_refused_request_has_used_no_tokens() -> None:
    async def main() -> None:
        async with relaying(FakeUpstream(answers_json({}, status=422))) as gateway:
            assert (await ask(gateway, {**ASK, "max_tokens": 9})).status == 422
            (finished,) = gateway.metrics.finished
            assert (finished.prompt_tokens, finished.completion_tokens) == (0, 0)

    run(main)


def test_an_answer_without_usage_is_counted_by_its_length() -> None:
    async def plain(received: Received, writer: asyncio.StreamWriter) -> None:
        raw = b'{"choices":[{"message":{"content":"' + b"word " * 200 + b'"}}]}'
        head = f"HTTP/1.1 200 OK\r\n{JSON}\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)

    async def main() -> None:
        async with relaying(FakeUpstream(plain)) as gateway:
            assert (await ask(gateway)).status == 200
            (finished,) = gateway.metrics.finished
            assert 100 < finished.completion_tokens < 1000

    run(main)


async def salt_of(gateway: FakeGateway, upstream: FakeUpstream, key: str, **more: Any) -> Any:
    """Return the cache salt that the other server gets with this caller's request."""
    answer = await ask(gateway, {**ASK, **more}, authorization=f"Bearer {key}")
    assert answer.status == 200
    return upstream.received[-1].json().get("cache_salt")


def test_tenants_share_no_cache_of_another_server() -> None:
    """C03: behind the gateway's one key the other server would take all tenants for one."""

    async def main() -> None:
        upstream = FakeUpstream()
        keys = "alice:key-alice-1,alice:key-alice-2,bob:key-bob-1"
        async with relaying(upstream, api_keys=keys) as gateway:
            alice = await salt_of(gateway, upstream, "key-alice-1")
            assert alice and alice == await salt_of(gateway, upstream, "key-alice-2")
            mine = await salt_of(gateway, upstream, "key-alice-1", cache_salt="mine")
            bob = await salt_of(gateway, upstream, "key-bob-1")
            imitated = await salt_of(gateway, upstream, "key-bob-1", cache_salt=alice)
            assert len({alice, mine, bob, imitated}) == 4
            assert not any("alice" in salt or "bob" in salt for salt in (alice, mine, bob))
        async with relaying(upstream, api_keys=keys, send_cache_salt=False) as gateway:
            assert await salt_of(gateway, upstream, "key-alice-1") is None
            assert await salt_of(gateway, upstream, "key-alice-1", cache_salt="x") == "x"
        async with relaying(upstream) as gateway:
            assert await salt_of(gateway, upstream, "nobody") is None

    run(main)


@pytest.mark.parametrize(("more", "reserved"), [({}, 128), ({"n": 2}, 256), ({"max_tokens": 9}, 9)])
def test_tokens_are_reserved_for_other_servers_too(more: dict[str, Any], reserved: int) -> None:
    async def main() -> None:
        async with relaying(FakeUpstream()) as gateway:
            bucket = TokenBucket(TokenBucket.Options(tokens_per_minute=1000))
            gateway.state.admission.use([bucket])
            first = await ask(gateway, {**ASK, **more})
            left = int(first.headers["x-ratelimit-remaining-tokens"])
            assert 1000 - reserved - 6 <= left < 1000 - reserved, "and a few for the prompt"
            again = await ask(gateway, {**ASK, **more})
            used = left - int(again.headers["x-ratelimit-remaining-tokens"])
            assert used in (6, 7), "settled to the 7 tokens that the other server counted"

    run(main)


def test_every_prompt_of_a_list_is_reserved() -> None:
    """O01: a list of prompts is no way around a limit on tokens."""

    async def main() -> None:
        async with relaying(FakeUpstream()) as gateway:
            gateway.state.admission.use(
                [TokenBucket(TokenBucket.Options(tokens_per_minute=90_000))]
            )
            for prompt, least, most in (
                (["x" * 4000] * 50, 50_000, 60_000),
                ([[1] * 100] * 20, 700, 3_000),
                ([1] * 100, 10, 200),
                ("x" * 4000, 1_000, 1_100),
            ):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 10}
                exchange = RawExchange(gateway.app, "/v1/completions", body).start()
                answer = await exchange.finished()
                reserved = 90_000 - int(answer.headers["x-ratelimit-remaining-tokens"])
                assert least <= reserved <= most
            body = {"model": "tiny", "prompt": ["x"] * 3000}
            exchange = RawExchange(gateway.app, "/v1/completions", body).start()
            assert (await exchange.finished()).status == 400

    run(main)


def test_a_host_that_cannot_be_one_is_a_failed_probe() -> None:
    """Whatever resolving a name raises, the gateway goes on and the other replicas serve."""

    async def main() -> None:
        async with relaying(FakeUpstream()) as gateway:
            entry = ReplicaEntry(kind="http", url=f"http://{'a' * 300}.example")
            odd = Upstream("odd", "tiny", entry, CircuitBreaker(), clock=SystemClock())
            await odd.start()
            assert odd.state == "starting" and odd.failure is not None
            await odd.close()
            assert (await ask(gateway)).status == 200

    run(main)


@pytest.mark.parametrize("engines", [0, 1])
def test_the_only_replica_comes_back(engines: int) -> None:
    """A gateway that refuses everything while all breakers are open would never try again."""

    async def main() -> None:
        upstreams = [] if engines else [FakeUpstream(answers_json({}, status=500))]
        async with relaying(*upstreams, engines=engines) as gateway:
            gateway.engine.fails_after = 0
            for _ in range(8):
                assert (await ask(gateway)).status in (500, 502, 503)
            (replica,) = gateway.router.replicas()
            assert replica.state == "failed"
            replica.breaker.try_now(gateway.state.clock.now())
            ready = RawExchange(gateway.app, "/ready", b"", method="GET").start()
            assert (await ready.finished()).status == 200
            gateway.engine.fails_after = None
            for upstream in upstreams:
                upstream.answer = answers_json(whole("well"))
            assert (await ask(gateway)).status == 200 and replica.is_ready

    run(main)


def test_a_trial_that_answers_lets_others_in_before_its_end() -> None:
    """A server that is back need not wait for the end of the long stream that found it out."""

    async def main() -> None:
        upstream = FakeUpstream(streams(delta("x"), 30.0))
        async with relaying(upstream) as gateway:
            (replica,) = gateway.router.replicas()
            replica.breaker.trip(gateway.state.clock.now())
            replica.breaker.try_now(gateway.state.clock.now())
            trial = RawExchange(gateway.app, CHAT, STREAMED).start()
            await until(lambda: b"data:" in trial.body)
            upstream.answer = answers_json(whole("hi"))
            assert replica.is_ready and (await ask(gateway)).status == 200
            trial.disconnect()
            await trial.finished()
            assert replica.is_ready

    run(main)
