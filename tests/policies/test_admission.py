"""Token buckets and KV footprints: what is charged, who waits, who is refused and what they are told."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import PluginError, RateLimited, Unavailable
from headrace.gateway.admission import AdmissionGate, Outcome, Ticket
from headrace.gateway.ledger import Ledger
from headrace.gateway.limit_store import MemoryLimitStore
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.types import (
    AdmissionView,
    Admit,
    PromptView,
    Queue,
    Reject,
    ReplicaView,
    TicketView,
)

REGISTRIES = Registries.from_manager(create_plugin_manager(discover=False))
ARRIVAL = TicketView("arrival", tenant="acme", organization="trade", num_body_bytes=100)
PARSED = replace(
    ARRIVAL,
    stage="parsed",
    model="m",
    num_prompt_tokens=100,
    max_output_tokens=400,
    expected_output_tokens=60,
    replica_id="r0",
)


def make(name: str, **options: Any) -> Any:
    return REGISTRIES.create("admission", name, options, pathlib.Path())


def keys(verdict: Any) -> dict[str, tuple[int, int]]:
    assert isinstance(verdict, Admit)
    return {charge.key: (charge.amount, charge.limit) for charge in verdict.charges}


class TestTokenBucket:
    def test_requests_at_the_door_and_tokens_when_they_are_known(self) -> None:
        policy = make("token_bucket", requests_per_minute=60, tokens_per_minute=9000, concurrency=4)
        assert keys(policy.admit(ARRIVAL, AdmissionView(), 0.0)) == {
            "requests/tenant/0:/acme": (1, 60),
            "concurrency/tenant/0:/acme": (1, 4),
        }
        assert keys(policy.admit(PARSED, AdmissionView(), 0.0)) == {
            "tokens/tenant/0:/acme": (500, 9000)
        }

    def test_per_model_waits_for_the_model(self) -> None:
        policy = make("token_bucket", requests_per_minute=60, per_model=True)
        assert keys(policy.admit(ARRIVAL, AdmissionView(), 0.0)) == {}
        assert keys(policy.admit(PARSED, AdmissionView(), 0.0)) == {
            "requests/tenant/1:m/acme": (1, 60)
        }

    def test_names_cannot_imitate_each_other(self) -> None:
        policy = make("token_bucket", requests_per_minute=60, per_model=True)
        one = replace(PARSED, model="a", tenant="b/c")
        other = replace(PARSED, model="a/b", tenant="c")
        assert keys(policy.admit(one, AdmissionView(), 0.0)) != keys(
            policy.admit(other, AdmissionView(), 0.0)
        )

    def test_overrides_replace_what_they_name(self) -> None:
        policy = make(
            "token_bucket",
            requests_per_minute=60,
            concurrency=2,
            overrides={"acme": {"requests_per_minute": 600}},
        )
        amounts = keys(policy.admit(ARRIVAL, AdmissionView(), 0.0)).values()
        assert list(amounts) == [(1, 600), (1, 2)]
        other = replace(ARRIVAL, tenant="other")
        assert (1, 60) in keys(policy.admit(other, AdmissionView(), 0.0)).values()

    def test_a_tenant_inside_its_organization(self) -> None:
        """Both charges are taken together: what the organization has no room for costs the tenant nothing."""
        store = MemoryLimitStore()
        gate = AdmissionGate(
            [
                make("token_bucket", requests_per_minute=60),
                make("token_bucket", by="organization", requests_per_minute=3),
            ],
            store=store,
        )
        for tenant in ("a", "b", "c"):
            assert gate.judge(gate.take(), replace(ARRIVAL, tenant=tenant), AdmissionView(), 0.0)
        with pytest.raises(RateLimited, match="exceed 3 requests per 60 s") as refusal:
            gate.judge(gate.take(), replace(ARRIVAL, tenant="d"), AdmissionView(), 0.0)
        assert refusal.value.reason == "requests" and len(store) == 4
        lonely = replace(ARRIVAL, tenant="d", organization="")
        assert gate.judge(gate.take(), lonely, AdmissionView(), 0.0)
        assert gate.refusals == {"requests": 1}

    def test_two_entries_of_the_same_kind_are_counted_apart(self) -> None:
        """A slow bucket and a quick one of the same tenant: neither takes from the other."""
        gate = AdmissionGate(
            [
                make("token_bucket", requests_per_minute=60, concurrency=9),
                make("kv_footprint"),
                make("token_bucket", requests_per_minute=600, requests_burst=3, concurrency=4),
            ]
        )
        tickets = [gate.take() for _ in range(4)]
        for ticket in tickets[:3]:
            assert gate.judge(ticket, ARRIVAL, AdmissionView(), 0.0)
        assert gate.held == {"concurrency/tenant/0:/acme": 3, "2/concurrency/tenant/0:/acme": 3}
        assert [state.used for state in tickets[2].states] == [3, 3, 3, 3]
        with pytest.raises(RateLimited, match="600 requests per 60 s and 3 at once"):
            gate.judge(tickets[3], ARRIVAL, AdmissionView(), 0.0)
        for ticket in tickets:
            gate.release(ticket)
        assert gate.held == {}

    @pytest.mark.parametrize(
        ("outcome", "left"),
        [
            (Outcome(130), 370),  # a caller that left is charged for what was produced
            (Outcome(500), 0),
            (Outcome(0, was_served=False), 500),
            (Outcome(), 0),
        ],
    )
    def test_tokens_are_settled_to_what_was_used(self, outcome: Outcome, left: int) -> None:
        policy = make("token_bucket", tokens_per_minute=500)
        store = MemoryLimitStore()
        gate = AdmissionGate([policy], store=store)
        ticket = gate.take()
        assert gate.judge(ticket, PARSED, AdmissionView(), 0.0)
        ticket.settle(outcome, 0.0)
        ticket.settle(Outcome(0), 0.0)
        (charge,) = policy.admit(PARSED, AdmissionView(), 0.0).charges
        (state,) = store.take_now([replace(charge, amount=0)], 0.0).states
        assert state.remaining == left

    def test_what_never_fits_is_said_to_never_fit(self) -> None:
        gate = AdmissionGate([make("token_bucket", tokens_per_minute=9000, tokens_burst=499)])
        ticket = gate.take()
        with pytest.raises(RateLimited, match="needs 500 tokens.*lower max_tokens") as refusal:
            gate.judge(ticket, PARSED, AdmissionView(), 0.0)
        assert refusal.value.reason == "request_too_large"
        assert (b"x-should-retry", b"false") in ticket.headers()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "set at least one of requests_per_minute"),
            ({"requests_per_minute": 0}, "a whole number of at least 1"),
            (
                {"concurrency": 1, "overrides": {"a": {"tokens": 3}}},
                "overrides.a has no limit 'tokens'",
            ),
            (
                {"concurrency": 1, "overrides": {"a": {"concurrency": 0}}},
                "must be at least 1, got 0",
            ),
            (
                {"concurrency": 1, "by": "server", "overrides": {"a": {"concurrency": 2}}},
                "overrides need by",
            ),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(PluginError, match=message):
            make("token_bucket", **options)


class Fleet:
    """A gate with kv_footprint over one replica of ten blocks, as the gateway drives it."""

    def __init__(self, **options: Any) -> None:
        self.ledger = Ledger()
        self.gate = AdmissionGate([make("kv_footprint", **options)], ledger=self.ledger)

    def load(self, view: TicketView, now: float) -> AdmissionView:
        reserved = self.ledger.reserved_blocks("r0")
        replica = ReplicaView("r0", num_blocks=10, reserved_blocks=reserved)
        return self.gate.load((replica,), view, now)

    def ask(self, now: float = 0.0, ticket: Ticket | None = None, **changes: Any) -> Ticket | None:
        """Return the ticket where it came in, None where it waits."""
        view = replace(PARSED, **changes)
        ticket = ticket or self.gate.take()
        self.last = ticket
        return ticket if self.gate.judge(ticket, view, self.load(view, now), now) else None


class TestKVFootprint:
    def test_the_blocks_a_request_can_need_are_reserved_until_it_ends(self) -> None:
        fleet = Fleet()
        ticket = fleet.ask()
        assert ticket is not None and fleet.ledger.reserved_blocks("r0") == 10  # 160 tokens
        ticket.settle(Outcome(120), 1.0)
        assert fleet.ledger.reserved_blocks("r0") == 0
        assert fleet.ask(cached_tokens=96, num_choices=3) is not None
        assert fleet.ledger.reserved_blocks("r0") == 6  # 64 tokens, two more last blocks

    def test_others_wait_and_come_in_order_when_blocks_are_free(self) -> None:
        fleet = Fleet()
        first = fleet.ask()
        assert first is not None
        waiting = []
        for _ in range(2):
            assert fleet.ask(num_prompt_tokens=20) is None
            waiting.append(fleet.last)
        assert (fleet.gate.queued_requests, fleet.gate.queued_tokens) == (2, 160)
        woken: list[int] = []
        for index, ticket in enumerate(waiting):
            ticket.wake = lambda index=index: woken.append(index)  # type: ignore[misc]
        first.settle(Outcome(100), 1.0)
        assert woken == [0], "only the head of the lane is told"
        assert fleet.ask(1.0, waiting[1], num_prompt_tokens=20) is None
        assert fleet.ask(1.0, waiting[0], num_prompt_tokens=20) is waiting[0]
        assert woken == [0, 1]
        assert fleet.ask(1.0, waiting[1], num_prompt_tokens=20) is waiting[1]
        assert fleet.gate.num_waiting == 0 and fleet.ledger.reserved_blocks("r0") == 10

    def test_nobody_overtakes_his_own_class_and_urgent_ones_overtake_all(self) -> None:
        fleet = Fleet()
        first = fleet.ask(num_prompt_tokens=20)  # 5 blocks
        assert first is not None and fleet.ask() is None  # needs all ten
        standard = fleet.last
        assert fleet.ask(num_prompt_tokens=1, expected_output_tokens=10) is None
        assert fleet.ask(num_prompt_tokens=1, expected_output_tokens=10, priority=5) is None
        assert fleet.ask(num_prompt_tokens=1, expected_output_tokens=10, priority=-1) is not None
        assert fleet.gate.num_waiting == 3
        assert {lane.name for lane in fleet.load(PARSED, 0.0).lanes} == {"m/standard", "m/batch"}
        fleet.gate.release(standard)
        assert fleet.gate.num_waiting == 2

    def test_a_request_larger_than_the_pool_comes_in_alone(self) -> None:
        fleet = Fleet()
        assert fleet.ask(num_prompt_tokens=5000) is not None
        assert fleet.ledger.reserved_blocks("r0") == 10

    def test_the_queue_is_bounded_in_requests_with_their_choices(self) -> None:
        """O01: n > 1 counts n, and what is refused is refused at the door where the queue is full."""
        fleet = Fleet(max_queued_requests=4)
        assert fleet.ask() is not None
        assert fleet.ask(num_choices=3) is None
        with pytest.raises(Unavailable, match="3 requests with 160 tokens wait already") as full:
            fleet.ask(num_choices=2)
        assert full.value.reason == "queue_full" and full.value.http_status == 503
        assert fleet.ask() is None
        with pytest.raises(Unavailable):
            fleet.gate.judge(fleet.gate.take(), ARRIVAL, fleet.load(ARRIVAL, 0.0), 0.0)
        assert fleet.gate.refusals == {"queue_full": 2}

    def test_the_queue_is_bounded_in_tokens_and_batch_gets_half(self) -> None:
        """O01: a few long prompts fill a queue as many short ones do."""
        fleet = Fleet(max_queued_tokens=400)
        assert fleet.ask() is not None
        assert fleet.ask(priority=1) is None
        with pytest.raises(Unavailable):
            fleet.ask(priority=1)
        assert fleet.ask() is None
        with pytest.raises(Unavailable):
            fleet.ask()

    def test_waiting_ends_in_time(self) -> None:
        fleet = Fleet(max_wait="5s")
        assert fleet.ask(0.0) is not None
        assert fleet.ask(1.0) is None
        late = fleet.last
        assert fleet.ask(5.9, late) is None
        with pytest.raises(Unavailable, match="waited its time") as refusal:
            fleet.ask(6.0, late)
        assert refusal.value.reason == "queue_timeout"

    def test_who_would_wait_too_long_is_told_so_at_once(self) -> None:
        fleet = Fleet(max_wait="5s")
        now = 0.0
        for _ in range(20):  # 160 tokens every two seconds: 80 per second
            ticket = fleet.ask(now)
            assert ticket is not None
            now += 2.0
            ticket.settle(Outcome(150), now)
        assert fleet.load(PARSED, now).tokens_per_second == pytest.approx(80, rel=0.15)
        assert fleet.ask(now) is not None
        assert fleet.ask(now) is None and fleet.ask(now) is None
        with pytest.raises(Unavailable, match=r"would wait about \d s, at most 5 s") as refusal:
            fleet.ask(now)
        assert refusal.value.reason == "predicted_wait"
        assert (refusal.value.retry_after_seconds or 0) >= 1
        assert fleet.ask(now, priority=-1) is None, "before them there is only himself"

    def test_each_prompt_of_a_call_reserves_where_it_goes(self) -> None:
        """What is free of one pool is no room for a prompt that goes to the other."""
        policy = make("kv_footprint")
        prompts = (
            PromptView(100, 60, 1, "r0"),
            PromptView(20, 60, 1, "r1", cached_tokens=16),
            PromptView(10, 60, 3, "r1"),
        )
        ticket = replace(PARSED, num_choices=5, prompts=prompts)

        def admit(*reserved: int) -> Any:
            replicas = [
                ReplicaView(f"r{place}", num_blocks=12, reserved_blocks=blocks)
                for place, blocks in enumerate(reserved)
            ]
            return policy.admit(ticket, AdmissionView(tuple(replicas)), 0.0)

        charges = admit(2, 0).charges
        assert [(charge.replica_id, charge.prompt_index, charge.amount) for charge in charges] == [
            ("r0", 0, 10),
            ("r1", 1, 4),
            ("r1", 2, 7),
        ]
        assert isinstance(admit(2, 1), Admit)
        assert isinstance(admit(3, 0), Queue) and isinstance(admit(0, 2), Queue)
        ledger = Ledger()
        gate = AdmissionGate([policy], ledger=ledger)
        load = AdmissionView((ReplicaView("r0", num_blocks=12), ReplicaView("r1", num_blocks=9)))
        held = gate.take()
        assert gate.judge(held, ticket, load, 0.0), "who needs more than a pool gets all of it"
        assert (ledger.reserved_blocks("r0"), ledger.reserved_blocks("r1")) == (10, 9)
        held.move("r0", 2)
        assert (ledger.reserved_blocks("r0"), ledger.reserved_blocks("r1")) == (15, 4)
        held.move("r2")
        assert ledger.reserved_blocks("r2") == 19 and not ledger.reserved_blocks("r0")
        gate.release(held)
        held.move("r0")
        assert not any(ledger.reserved_blocks(f"r{place}") for place in range(3))

    def test_blocks_that_move_wake_who_waits_for_them(self) -> None:
        fleet = Fleet()
        first = fleet.ask()
        assert first is not None and fleet.ask() is None
        woken: list[str] = []
        fleet.last.wake = lambda: woken.append("now")
        first.move("r0", 0)
        assert woken == []
        first.move("r1", 0)
        assert woken == ["now"] and fleet.ask(1.0, fleet.last) is fleet.last

    def test_a_replica_that_tells_no_blocks_takes_all(self) -> None:
        policy = make("kv_footprint")
        view = AdmissionView((ReplicaView("r0"),))
        assert policy.admit(PARSED, view, 0.0) == Admit()
        assert policy.admit(replace(PARSED, replica_id="gone"), view, 0.0) == Admit()
        assert isinstance(policy.admit(ARRIVAL, AdmissionView(queued_requests=999), 0.0), Reject)

    def test_an_overcommitted_pool(self) -> None:
        fleet = Fleet(pool_share=2.0)
        assert fleet.ask() is not None and fleet.ask() is not None and fleet.ask() is None
        policy = make("kv_footprint")
        full = AdmissionView((ReplicaView("r0", num_blocks=10, reserved_blocks=10),))
        assert policy.admit(PARSED, full, 3.0) == Queue("m/standard", 33.0)
