"""A request whose engine dies moves to another one while nothing of it has gone out, and no later."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from gateway_relaying import ASK, CHAT, STREAMED, run

from headrace.errors import InvalidRequest, Unavailable
from headrace.gateway.failover import MAX_ATTEMPTS
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange, parse_events, until
from headrace.types import AdmissionView, Admit, Charge, TicketView


def engines(number: int) -> FakeGateway:
    return FakeGateway(*[FakeClient(f"tiny/{place}") for place in range(number)])


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "stream"])
def test_an_accepted_request_without_bytes_moves(body: dict[str, Any]) -> None:
    async def main() -> None:
        gateway = engines(2)
        first, second = gateway.engines
        first.may_step.clear()
        exchange = RawExchange(gateway.app, CHAT, body).start()
        await until(lambda: first.requests)
        await asyncio.sleep(0)
        first.die()
        await exchange.finished()
        assert exchange.status == 200 and "Hello world" in _text(exchange, body)
        assert len(second.requests) == 1 and gateway.metrics.finished[0].status == 200
        assert gateway.metrics.finished[0].completion_tokens == 3
        first.become_ready()
        first.may_step.set()
        gateway.assert_idle()

    run(main)


def _text(exchange: RawExchange, body: dict[str, Any]) -> str:
    if body is ASK:
        return str(exchange.json()["choices"][0]["message"]["content"])
    events = parse_events(exchange.body)[:-1]
    return "".join(each["choices"][0]["delta"].get("content", "") for each in events)


def test_an_answer_in_one_piece_moves_however_far_it_was() -> None:
    """R07: nothing has gone out, so it begins anew, and says nothing twice."""

    async def main() -> None:
        gateway = engines(2)
        first, _ = gateway.engines
        first.step_seconds = 0.01
        first.script = lambda request, choice: first.tokens_of("never to be seen " * 9)
        exchange = RawExchange(gateway.app, CHAT, {**ASK, "n": 2}).start()
        await until(lambda: first.requests)
        await asyncio.sleep(0.05)
        first.die()
        answer = (await exchange.finished()).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == ["Hello world"] * 2
        assert answer["usage"]["completion_tokens"] == 6

    run(main)


def test_after_the_first_event_there_is_one_error_event() -> None:
    """R07: no replay, no second engine."""

    async def main() -> None:
        gateway = engines(2)
        first, second = gateway.engines
        first.step_seconds = 0.01
        first.script = lambda request, choice: first.tokens_of("one two three four " * 9)
        exchange = RawExchange(gateway.app, CHAT, STREAMED).start()
        await exchange.until_sent(2)
        first.die()
        await exchange.finished()
        events = parse_events(exchange.body)
        assert "error" in events[-1] and ["error" in each for each in events].count(True) == 1
        assert second.requests == []

    run(main)


def test_a_full_engine_sends_requests_on_and_callers_mistakes_stay() -> None:
    """O09: a refusal for overload is tried elsewhere once, a caller's own mistake never."""

    async def main() -> None:
        gateway = engines(2)
        first, second = gateway.engines
        first.refusal = Unavailable("full", retry_after_seconds=3.0)
        for _ in range(8):
            exchange = RawExchange(gateway.app, CHAT, ASK).start()
            assert (await exchange.finished()).status == 200
        assert gateway.router.replicas()[0].breaker.is_closed  # busy is not broken
        second.refusal = first.refusal
        exchange = await RawExchange(gateway.app, CHAT, ASK).start().finished()
        assert exchange.status == 503 and exchange.headers["retry-after"] == "3"
        first.refusal = second.refusal = InvalidRequest("no")
        before = len(first.requests) + len(second.requests)
        for _ in range(20):
            exchange = await RawExchange(gateway.app, CHAT, ASK).start().finished()
            assert exchange.status == 400
        assert len(first.requests) + len(second.requests) == before + 20
        assert all(replica.is_ready for replica in gateway.router.replicas())

    run(main)


def test_a_request_that_breaks_everything_breaks_only_so_much() -> None:
    async def main() -> None:
        gateway = engines(6)
        for engine in gateway.engines:
            engine.fails_after = 0
        exchange = await RawExchange(gateway.app, CHAT, ASK).start().finished()
        assert exchange.status == 500
        assert sum(len(engine.requests) for engine in gateway.engines) == MAX_ATTEMPTS

    run(main)


def test_each_prompt_of_a_call_moves_by_itself() -> None:
    async def main() -> None:
        gateway = engines(2)
        first, second = gateway.engines
        first.may_step.clear()
        body = {"model": "tiny", "prompt": ["a", "b"], "stream": True}
        exchange = RawExchange(gateway.app, "/v1/completions", body).start()
        await until(lambda: first.requests and second.requests)
        await asyncio.sleep(0.05)
        first.die()
        await exchange.finished()
        texts = {0: "", 1: ""}
        for each in parse_events(exchange.body)[:-1]:
            for choice in each["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "Hello world", 1: "Hello world"}

    run(main)


class Blocks:
    """Lets everybody in, and reserves two KV blocks for each prompt where it is proposed to go."""

    name: ClassVar[str] = "blocks"

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit:
        if ticket.stage == "arrival":
            return Admit()
        replicas = [each.replica_id for each in ticket.prompts] or [ticket.replica_id]
        return Admit(
            tuple(
                Charge("kv", 2, 64, unit="blocks", replica_id=replica, prompt_index=index)
                for index, replica in enumerate(replicas)
            )
        )


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]], ids=["one", "two"])
def test_reserved_blocks_go_where_the_request_goes(prompts: list[str]) -> None:
    """Each prompt reserves where it runs: what the dead replica had promised is promised by the other."""

    async def main() -> None:
        fakes = [FakeClient(f"tiny/{place}") for place in range(2)]
        gateway = FakeGateway(*fakes, admission=[Blocks()])
        reserved = gateway.router.ledger.reserved_blocks
        for fake in fakes:
            fake.may_step.clear()
        body = {"model": "tiny", "prompt": prompts}
        exchange = RawExchange(gateway.app, "/v1/completions", body).start()
        await until(lambda: sum(len(fake.requests) for fake in fakes) == len(prompts))
        broken = next(fake for fake in fakes if fake.requests)
        other = next(fake for fake in fakes if fake is not broken)
        before = len(other.requests)
        assert (reserved(broken.id), reserved(other.id)) == (2, 2 * before)
        broken.die()
        await until(lambda: len(other.requests) == len(prompts))
        assert (reserved(broken.id), reserved(other.id)) == (0, 2 * len(prompts))
        other.may_step.set()
        assert (await exchange.finished()).status == 200
        broken.become_ready()
        gateway.assert_idle()

    run(main)
