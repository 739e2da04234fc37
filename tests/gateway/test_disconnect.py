"""A client that leaves, streamed or not, at any stage: aborted at once, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from headrace.config.schema import GatewayConfig
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange, parse_events, until
from headrace.types import GenerationRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "max_tokens": 200}
Stage = Callable[[FakeClient], Awaitable[None]]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    with blockbuster_ctx("headrace.gateway"):
        asyncio.run(bounded())


async def running(engine: FakeClient) -> None:
    engine.step_seconds = 0.002
    await until(lambda: engine.requests)
    await asyncio.sleep(0.01)


async def queued(engine: FakeClient) -> None:
    engine.may_accept.clear()
    await until(lambda: engine.requests)


async def prefilling(engine: FakeClient) -> None:
    engine.may_step.clear()
    await until(lambda: engine.requests)
    await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("stage", [running, queued, prefilling])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_leaving_aborts(path: str, stage: Stage, streamed: bool) -> None:
    async def main() -> None:
        gateway = FakeGateway()
        engine = gateway.engine
        batch = {"prompt": ["a", "b"], "n": 2, "max_tokens": 200, "ignore_eos": True}
        body = LONG if path == CHAT else batch
        reached = asyncio.ensure_future(stage(engine))
        exchange = RawExchange(gateway.app, path, {**body, "stream": streamed}).start()
        await reached
        exchange.disconnect()
        await exchange.finished()
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        gateway.assert_idle()
        (summary,) = gateway.metrics.finished
        assert summary.status == 499
        assert set(summary.finish_reasons) == {"abort"}
        aborts = f'headrace_request_aborts_total{{endpoint="{path}",model="tiny"}} 1.0'
        assert aborts in gateway.state.metrics.render().decode()
        assert not exchange.is_complete

    run(main)


def test_leaving_while_the_body_is_sent() -> None:
    async def main() -> None:
        gateway = FakeGateway()
        exchange = RawExchange(gateway.app, CHAT, b"")
        exchange._incoming.get_nowait()
        exchange._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        exchange.start()
        exchange.disconnect()
        await exchange.finished()
        assert exchange.sent == []
        gateway.assert_idle()
        assert gateway.metrics.finished[0].status == 499

    run(main)


def test_a_client_that_stays_gets_all(gateway: FakeGateway) -> None:
    """The watch on the client ends with the answer: a disconnect behind it is no abort."""

    async def main() -> None:
        for streamed in (True, False):
            exchange = RawExchange(gateway.app, CHAT, {**LONG, "stream": streamed}).start()
            await exchange.until_sent(1)
            await exchange.finished()
            exchange.disconnect()
            assert exchange.is_complete
        assert gateway.engine.aborted == []
        assert [summary.status for summary in gateway.metrics.finished] == [200, 200]

    run(main)


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def main() -> None:
        config = GatewayConfig(stall_timeout=0.05, keepalive_interval=0.01)
        gateway = FakeGateway(config=config)
        engine = gateway.engine
        engine.step_seconds = 0.001
        slow = RawExchange(gateway.app, CHAT, {**LONG, "stream": True}).start()
        await slow.until_sent(2)
        slow.may_send.clear()
        quick = RawExchange(gateway.app, CHAT, {**LONG, "max_tokens": 20, "stream": True}).start()
        await quick.finished()
        assert parse_events(quick.body)[-1] == "[DONE]"
        await slow.finished()
        assert not slow.is_complete
        assert engine.aborted in ([], [engine.requests[0].request_id])
        gateway.assert_idle()
        assert sorted(summary.status for summary in gateway.metrics.finished) == [200, 499]

    run(main)


def test_the_server_stops_while_requests_run() -> None:
    """A cancelled request (a server that is shut down hard) still releases and reports."""

    async def main() -> None:
        gateway = FakeGateway()
        gateway.engine.may_step.clear()
        exchange = RawExchange(gateway.app, CHAT, LONG).start()
        await until(lambda: gateway.engine.requests)
        assert exchange.task is not None
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        gateway.assert_idle()
        assert len(gateway.metrics.finished) == 1

    run(main)


def test_the_same_client_id_twice_at_once() -> None:
    """P23: a client's id is only echoed: both are answered, each with an id of our own."""

    async def main() -> None:
        gateway = FakeGateway()
        engine = gateway.engine

        def script(request: GenerationRequest, choice: int) -> list[int]:
            return engine.tokens_of(f"answer {len(engine.requests)}")

        engine.script = script
        headers = {"X-Request-Id": "same"}
        body: dict[str, Any] = {**LONG, "ignore_eos": False, "request_id": "same"}
        first = RawExchange(gateway.app, CHAT, body, headers=headers).start()
        second = RawExchange(gateway.app, CHAT, body, headers=headers).start()
        left = RawExchange(gateway.app, CHAT, LONG, headers=headers).start()
        left.disconnect()
        for exchange in (first, second):
            await exchange.finished()
            assert exchange.status == 200
            assert exchange.headers["x-request-id"] == "same"
        await left.finished()
        again = await RawExchange(gateway.app, CHAT, body, headers=headers).start().finished()
        assert again.status == 200
        ids = [exchange.json()["id"] for exchange in (first, second, again)]
        assert len(set(ids)) == 3
        gateway.assert_idle()
        page = gateway.state.metrics.render().decode()
        assert f'headrace_requests_active{{endpoint="{CHAT}",model="tiny"}} 0.0' in page

    run(main)
