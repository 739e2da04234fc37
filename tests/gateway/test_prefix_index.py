"""What was sent where: bounded, forgetful of replicas that restart, and the same for the same prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from headrace import prefix_hash
from headrace.gateway.expected_output import ExpectedOutput
from headrace.gateway.ledger import Ledger, Load, load_of
from headrace.gateway.prefix_index import MAX_BLOCKS, PrefixIndex
from headrace.gateway.text_prefix import canonical_prompt, estimated_tokens, text_prefix_hashes
from headrace.policies.routing.prefix_hash import PrefixHash
from headrace.policies.routing.session import Session
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway
from headrace.types import RoutingRequest

CHAT = "/v1/chat/completions"


def chain(name: str, length: int) -> tuple[bytes, ...]:
    """Digests of a prompt whose blocks are called name/0, name/1, ..."""
    return tuple(f"{name}/{index}".encode() for index in range(length))


def test_the_longest_prefix_of_each_replica() -> None:
    index = PrefixIndex()
    index.record("a", chain("x", 5))
    index.record("b", chain("x", 3))
    index.record("c", chain("y", 9))
    assert index.match(chain("x", 8)) == {"a": 5, "b": 3}
    assert index.match(chain("x", 2)) == {"a": 2, "b": 2}
    assert index.match(chain("z", 4)) == {} == index.match(())


def test_recording_says_what_was_sent_before() -> None:
    index = PrefixIndex()
    assert index.record("a", chain("x", 5)) == 0
    assert index.record("b", chain("x", 3)) == 0
    for replica, length in (("a", 8), ("b", 8), ("a", 2), ("a", 8), ("c", 1), ("c", 0)):
        before = index.match_one(replica, chain("x", length))
        assert index.record(replica, chain("x", length)) == before
    assert index.match(chain("x", 8)) == {"a": 8, "b": 8, "c": 1}


def test_a_replica_that_restarts_loses_its_entries_and_others_keep_theirs() -> None:
    index = PrefixIndex()
    for replica in ("a", "b"):
        index.record(replica, chain("x", 4))
    index.forget("a")
    index.forget("never there")
    assert index.match(chain("x", 4)) == {"b": 4}
    index.record("a", chain("x", 1))
    assert index.match(chain("x", 4)) == {"a": 1, "b": 4}


def test_a_thousand_restarts_bring_nothing_back() -> None:
    index = PrefixIndex()
    index.record("steady", chain("x", 3))
    for round_number in range(1000):
        index.record("restarting", chain(f"r{round_number}", 2))
        index.forget("restarting")
    assert index.match(chain("x", 3)) == {"steady": 3}
    index.record("restarting", chain("new", 1))
    assert index.match(chain("r999", 2)) == {} and index.match(chain("new", 1)) == {"restarting": 1}
    assert len(index) < 200


def test_the_size_is_a_hard_limit_and_the_end_of_a_chain_goes_first() -> None:
    index = PrefixIndex(max_entries=10)
    index.record("a", chain("old", 6))
    index.record("a", chain("new", 6))
    assert len(index) == 10
    assert index.match(chain("new", 6)) == {"a": 6}
    assert index.match(chain("old", 6)) == {"a": 4}
    index.record("a", chain("old", 1))
    index.record("a", chain("newest", 6))
    assert index.match(chain("old", 6))["a"] >= 1


def test_of_a_very_long_prompt_the_beginning_counts() -> None:
    index = PrefixIndex()
    index.record("a", chain("x", MAX_BLOCKS + 100))
    assert len(index) == MAX_BLOCKS
    assert index.match(chain("x", MAX_BLOCKS + 50)) == {"a": MAX_BLOCKS}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(1, 6))))
def test_it_agrees_with_a_plain_table(sent: list[tuple[str, str, int]]) -> None:
    index = PrefixIndex()
    longest: dict[tuple[str, str], int] = {}
    for replica, prompt, length in sent:
        index.record(replica, chain(prompt, length))
        longest[replica, prompt] = max(length, longest.get((replica, prompt), 0))
    for prompt in "xyz":
        expected = {each: blocks for (each, p), blocks in longest.items() if p == prompt}
        assert index.match(chain(prompt, 6)) == expected
        for replica in "abc":
            assert index.match_one(replica, chain(prompt, 6)) == expected.get(replica, 0)


# --- prompts whose tokens nobody here knows ----------------------------------------------


TURNS = [
    {"role": "system", "content": "You are terse. " * 20},
    {"role": "user", "content": "Name the capital of France, please."},
]


def hashes(body: dict[str, Any], salt: str = "") -> tuple[bytes, ...]:
    return text_prefix_hashes(canonical_prompt(body), model="m", salt=salt)


def test_equal_conversations_have_equal_chains_however_they_are_written() -> None:
    """R08: content as a string or as parts, the order of JSON keys, explicit nulls."""
    parts = [
        {"content": [{"type": "text", "text": turn["content"]}], "role": turn["role"]}
        for turn in TURNS
    ]
    split = [
        {**TURNS[0], "content": [{"text": "You are terse. "}] * 20},
        {**TURNS[1], "name": None},
    ]
    plain = hashes({"messages": TURNS})
    assert len(plain) >= 5
    assert plain == hashes({"messages": parts}) == hashes({"messages": split, "temperature": 1})
    calls = [{"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}]
    asked = [hashes({"messages": [*TURNS, {"role": "assistant", "tool_calls": c}]}) for c in calls]
    assert asked[0] == asked[1]


def test_a_later_turn_keeps_the_chain_and_an_earlier_change_breaks_it() -> None:
    """R08: what leads is what counts; a clock in the system line is another prompt."""
    plain = hashes({"messages": TURNS})
    more = hashes({"messages": [*TURNS, {"role": "assistant", "content": "Paris. " * 30}]})
    assert more[: len(plain)] == plain and len(more) > len(plain)
    clock = hashes({"messages": [{"role": "system", "content": "It is 12:01."}, *TURNS]})
    assert not set(clock) & set(plain)
    assert not set(hashes({"messages": TURNS}, salt="tenant")) & set(plain)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 3, "prompt": None},
        {"messages": [None, 1, "x", {"role": 5, "content": {"a": [1]}}, {"content": [None, 3]}]},
        {"prompt": ["first", "second"]},
        {"prompt": [[1, 2, 3], [4]]},
        {"prompt": [1, 2, 3]},
        {"prompt": "text"},
    ],
)
def test_any_body_has_a_prompt_of_some_kind(body: dict[str, Any]) -> None:
    text = canonical_prompt(body)
    assert isinstance(text, bytes) and estimated_tokens(text) >= 1


# --- in the gateway ------------------------------------------------------------------------


def fleet(count: int) -> FakeGateway:
    engines = [FakeClient(f"tiny/{index}") for index in range(count)]
    return FakeGateway(*engines, routing=PrefixHash(PrefixHash.Options()))


def body(system: str, question: str) -> dict[str, Any]:
    roles = {"system": system, "user": question}
    return {"messages": [{"role": role, "content": text} for role, text in roles.items()]}


def test_equal_beginnings_meet_on_one_replica() -> None:
    """R08 through HTTP: the key is the rendered prompt's first blocks."""
    gateway = fleet(3)
    rng = random.Random(5)
    systems = ["".join(rng.choices("abcdefgh ", k=90)) for _ in range(6)]
    with TestClient(gateway.app) as client:
        for round_number in range(4):
            for system in rng.sample(systems, len(systems)):
                ask = body(system, f"{round_number}?")
                if round_number == 2:
                    ask["messages"][0]["content"] = [{"type": "text", "text": system}]
                assert client.post(CHAT, json=ask).status_code == 200
    homes: dict[bytes, set[str]] = {}
    for engine in gateway.engines:
        for request in engine.requests:
            homes.setdefault(request.prefix_hashes[4], set()).add(engine.id)
    assert len(homes) == 6 and all(len(home) == 1 for home in homes.values())
    assert {len(engine.requests) for engine in gateway.engines} == {8}
    gateway.assert_idle()


def test_the_gateway_names_blocks_as_the_engine_does() -> None:
    gateway = fleet(1)
    with TestClient(gateway.app) as client:
        client.post(CHAT, json={**body("x" * 60, "?"), "cache_salt": "pepper"})
    (request,) = gateway.engine.requests
    card = gateway.engine.card_when_ready
    root = prefix_hash.root_digest(model_revision=card.revision, salt=request.cache_salt)
    expected = prefix_hash.block_digests(root, request.prompt_token_ids, card.block_size)
    assert request.prefix_hashes == tuple(expected) and request.cache_salt


def test_a_restarted_replica_is_cold_and_an_unready_one_changes_nothing() -> None:
    """R04: only replicas that can serve are compared."""
    gateway = fleet(3)
    router = gateway.router
    ask = RoutingRequest("tiny", num_prompt_tokens=64, prefix_hashes=chain("x", 4))
    home = router.choose(ask, 0.0)
    hold = router.place(home, ask)
    assert router.ledger.load(home.id) == Load(1, 64, 64, 4)
    assert router.matched_tokens(home, ask) == 64
    hold.prefilled()
    hold.prefilled()
    assert router.ledger.load(home.id) == Load(1, 0, 0, 4)
    other = next(engine for engine in gateway.engines if engine.id != home.id)
    other.report("load", 0.5)
    assert router.choose(ask, 0.0) is home
    next(each for each in gateway.engines if each.id == home.id)._restarts_total += 1
    assert router.matched_tokens(home, ask) == 0
    hold.release()
    assert router.ledger.load(home.id) == Load()


def test_work_is_what_is_not_known_to_be_there() -> None:
    ask = RoutingRequest("m", num_prompt_tokens=640, expected_output_tokens=20)
    assert load_of(ask, matched_tokens=608, block_size=16) == Load(1, 52, 32, 42)
    assert load_of(ask, matched_tokens=640, block_size=16) == Load(1, 21, 1, 42)


def test_blocks_are_reserved_and_given_back() -> None:
    ledger = Ledger()
    ledger.reserve("a", 5)
    ledger.reserve("a", 3)
    ledger.reserve("a", -8)
    assert ledger.reserved_blocks("a") == 0
    with pytest.raises(AssertionError, match="more blocks given back"):
        ledger.reserve("a", -1)


class TestExpectedOutput:
    def test_nothing_known_is_what_was_asked_for(self) -> None:
        assert ExpectedOutput().predict("m", "t", 512) == 512
        assert ExpectedOutput().predict("m", "t", 512, unknown=100) == 100
        assert ExpectedOutput().predict("m", "t", 50, unknown=100) == 50

    def test_a_tenant_is_learnt_and_a_new_one_taken_for_the_average(self) -> None:
        expected = ExpectedOutput()
        for _ in range(50):
            expected.observe("m", "short", 20)
        assert expected.predict("m", "short", 512) == 20
        assert expected.predict("m", "new", 512) == 20
        assert expected.predict("m", "new", 5) == 5
        assert expected.predict("other", "new", 512) == 512

    def test_most_requests_stay_below(self) -> None:
        rng = random.Random(1)
        expected = ExpectedOutput()
        for _ in range(300):
            expected.observe("m", "t", int(rng.expovariate(1 / 100)))
        bound = expected.predict("m", "t", 4096)
        below = sum(rng.expovariate(1 / 100) < bound for _ in range(1000))
        assert 800 < below < 1000

    def test_memory_is_bounded(self) -> None:
        expected = ExpectedOutput(max_tenants=10)
        for number in range(1000):
            expected.observe("m", f"tenant-{number}", 1)
        assert len(expected) == 10


def test_a_session_stays_where_it_is() -> None:
    """The header names it, else the body's `user`; neither reaches the engine."""
    engines = [FakeClient(f"tiny/{index}") for index in range(4)]
    gateway = FakeGateway(*engines, routing=Session())
    with TestClient(gateway.app) as client:
        for number in range(8):
            for _ in range(3):
                ask = {"prompt": f"{number}", "user": "somebody", "max_tokens": 1}
                headers = {"X-Session-ID": f"session-{number}"}
                assert client.post("/v1/completions", json=ask, headers=headers).status_code == 200
        by_header = {engine.id: len(engine.requests) for engine in engines}
        for number in range(6):
            ask = {"prompt": f"{number}", "user": "somebody", "max_tokens": 1}
            assert client.post("/v1/completions", json=ask).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x", "user": 7}).status_code == 200
    assert len([count for count in by_header.values() if count]) > 1
    assert all(count % 3 == 0 for count in by_header.values())
    more = [len(engine.requests) - by_header[engine.id] for engine in engines]
    assert sorted(more)[-1] in (6, 7), "all of one user's in one place"
