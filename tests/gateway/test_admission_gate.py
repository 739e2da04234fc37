"""Tickets: judged twice, charged all or nothing, queued first come first served, released once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

import pytest
from starlette.testclient import TestClient

from headrace.errors import RateLimited, Unavailable
from headrace.gateway.admission import AdmissionGate
from headrace.testing.fake_gateway import FakeGateway, RawExchange, until
from headrace.types import AdmissionView, Admit, Charge, PromptView, Queue, Reject, TicketView

Verdict = Admit | Queue | Reject
LOAD = AdmissionView()
ARRIVAL = TicketView(stage="arrival")
CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


class Rule:
    """An admission policy made of a function."""

    name: ClassVar[str] = "rule"

    def __init__(self, verdict: Callable[[TicketView, float], Verdict]) -> None:
        self._verdict = verdict
        self.seen: list[TicketView] = []
        self.loads: list[AdmissionView] = []

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Verdict:
        self.seen.append(ticket)
        self.loads.append(view)
        return self._verdict(ticket, now)


def one_at_a_time(ticket: TicketView, now: float) -> Verdict:
    return Admit((Charge("all", 1, 1),)) if ticket.stage == "arrival" else Admit()


def test_concurrency_is_given_back_exactly_once() -> None:
    gate = AdmissionGate([Rule(one_at_a_time)])
    first = gate.take()
    assert gate.judge(first, ARRIVAL, LOAD, 0.0)
    with gate.take() as second, pytest.raises(RateLimited) as refusal:
        gate.judge(second, ARRIVAL, LOAD, 0.0)
    assert refusal.value.retry_after_seconds == 1.0
    assert gate.held == {"all": 1}
    for _ in range(3):
        gate.release(first)
    assert gate.held == {} and gate.num_tickets == 0
    with gate.take() as third:
        assert gate.judge(third, ARRIVAL, LOAD, 0.0)


def test_charges_are_taken_together_or_not_at_all() -> None:
    gate = AdmissionGate([Rule(lambda ticket, now: Admit((Charge("a", 1, 9), Charge("b", 2, 1))))])
    with gate.take() as ticket, pytest.raises(RateLimited):
        gate.judge(ticket, ARRIVAL, LOAD, 0.0)
    assert gate.held == {}


def test_a_rate_window_drains_with_time_and_not_with_release() -> None:
    rate = Charge("key", 5, 10, window_seconds=60.0)
    gate = AdmissionGate([Rule(lambda ticket, now: Admit((rate,)))])
    for now in (0.0, 0.0):
        with gate.take() as ticket:
            assert gate.judge(ticket, ARRIVAL, LOAD, now)
    with gate.take() as ticket, pytest.raises(RateLimited) as refusal:
        gate.judge(ticket, ARRIVAL, LOAD, 6.0)
    assert refusal.value.retry_after_seconds == pytest.approx(24.0)
    with gate.take() as ticket:
        assert gate.judge(ticket, ARRIVAL, LOAD, 30.0)


def test_a_lane_is_first_come_first_served() -> None:
    free = [False]
    rule = Rule(lambda ticket, now: Admit() if free[0] else Queue("lane", 10.0))
    gate = AdmissionGate([rule])
    first, second = gate.take(), gate.take()
    assert not gate.judge(first, ARRIVAL, LOAD, 0.0)
    assert not gate.judge(second, ARRIVAL, LOAD, 0.0)
    assert gate.num_waiting == 2
    free[0] = True
    assert not gate.judge(second, ARRIVAL, LOAD, 1.0)
    assert gate.judge(first, ARRIVAL, LOAD, 1.0)
    assert gate.judge(second, ARRIVAL, LOAD, 1.0)
    assert gate.num_waiting == 0


def test_waiting_ends_at_its_time_and_leaving_frees_the_lane() -> None:
    gate = AdmissionGate([Rule(lambda ticket, now: Queue("lane", 10.0))])
    first, second = gate.take(), gate.take()
    for ticket in (first, second):
        assert not gate.judge(ticket, ARRIVAL, LOAD, 0.0)
    with pytest.raises(Unavailable, match="overloaded"):
        gate.judge(second, ARRIVAL, LOAD, 10.0)
    gate.release(second)
    gate.release(first)
    assert gate.num_waiting == gate.num_tickets == 0


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [("caller", 429, "rate_limit_exceeded"), ("server", 503, "unavailable")],
)
def test_a_refusal_over_http(fault: str, status: int, code: str) -> None:
    gateway = FakeGateway(admission=[Rule(lambda ticket, now: Reject(fault, 1.2, "too much"))])
    with TestClient(gateway.app) as client:
        response = client.post(CHAT, content=b"not even json")
    assert response.status_code == status
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == "too much"
    gateway.assert_idle()


def test_the_second_judgement_knows_the_request() -> None:
    rule = Rule(lambda ticket, now: Admit())
    gateway = FakeGateway(admission=[rule])
    with TestClient(gateway.app) as client:
        raw = b'{"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 4}'
        assert client.post("/v1/completions", content=raw).status_code == 200
    arrival, parsed = rule.seen
    for load in rule.loads:
        assert [(replica.id, replica.num_requests) for replica in load.replicas] == [("tiny/0", 0)]
    assert arrival == TicketView(stage="arrival", num_body_bytes=len(raw))
    assert parsed == TicketView(
        stage="parsed",
        num_body_bytes=len(raw),
        model="tiny",
        num_prompt_tokens=3,
        max_output_tokens=16,
        num_choices=4,
        replica_id="tiny/0",
        expected_output_tokens=16,
        prompts=(PromptView(2, 8, 2, "tiny/0"), PromptView(1, 8, 2, "tiny/0")),
    )


@pytest.mark.parametrize("how", ["answer", "bad body", "engine failure", "disconnect"])
def test_a_place_is_free_again_however_a_request_ends(how: str) -> None:
    async def main() -> None:
        gateway = FakeGateway(admission=[Rule(one_at_a_time)])
        engine = gateway.engine
        engine.may_step.clear()
        body: object = b"{" if how == "bad body" else USER
        exchange = RawExchange(gateway.app, CHAT, body).start()
        if how != "bad body":
            await until(lambda: engine.requests)
            other = await RawExchange(gateway.app, CHAT, USER).start().finished()
            assert other.status == 429
        if how == "engine failure":
            engine.die()
            engine.become_ready()
        if how == "disconnect":
            exchange.disconnect()
            await exchange.finished()
        engine.may_step.set()
        await exchange.finished()
        gateway.assert_idle()
        after = await RawExchange(gateway.app, CHAT, USER).start().finished()
        assert after.status == 200

    asyncio.run(main())


def test_a_queued_request_waits_for_its_place_and_a_leaving_client_gives_it_up() -> None:
    async def main() -> None:
        gateway: FakeGateway

        def verdict(ticket: TicketView, now: float) -> Verdict:
            if ticket.stage == "arrival":
                return Admit()
            is_free = not gateway.state.admission.held
            return Admit((Charge("all", 1, 1),)) if is_free else Queue("lane", now + 60)

        gateway = FakeGateway(admission=[Rule(verdict)])
        engine = gateway.engine
        engine.may_step.clear()
        first = RawExchange(gateway.app, CHAT, USER).start()
        await until(lambda: engine.requests)
        second = RawExchange(gateway.app, CHAT, USER).start()
        third = RawExchange(gateway.app, CHAT, USER).start()
        await until(lambda: gateway.state.admission.num_waiting == 2)
        second.disconnect()
        await second.finished()
        assert gateway.state.admission.num_waiting == 1
        engine.may_step.set()
        await first.finished()
        await third.finished()
        assert (first.status, second.status, third.status) == (200, None, 200)
        gateway.assert_idle()

    asyncio.run(main())
