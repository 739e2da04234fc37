"""Each routing policy's own rule, on exact cases and on golden runs."""

from __future__ import annotations

import collections
import hashlib
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.errors import PluginError
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.policies.routing.prefix_hash import PrefixHash
from headrace.policies.routing.session import Session
from headrace.types import ReplicaView, RoutingRequest

REGISTRIES = Registries.from_manager(create_plugin_manager(discover=False))
ALL = ("a", "b", "c", "d")


def make(name: str, **options: Any) -> Any:
    return REGISTRIES.create("routing", name, options, pathlib.Path())


def views(ids: Sequence[str] = ALL, **changes: Any) -> list[ReplicaView]:
    """(tokens in flight, tokens matched) by id; others have none."""
    pairs = {each: changes.get(each, (0, 0)) for each in ids}
    return [
        ReplicaView(each, num_tokens=load, matched_tokens=matched)
        for each, (load, matched) in pairs.items()
    ]


def request(tokens: int = 640, session: str = "", **values: Any) -> RoutingRequest:
    return RoutingRequest("m", session=session, num_prompt_tokens=tokens, **values)


class TestPrefixHash:
    def choose(self, *, ask: RoutingRequest | None = None, **changes: Any) -> str:
        return PrefixHash(PrefixHash.Options()).choose(ask or request(), views(**changes), 0.0)

    def test_the_longest_prefix_wins(self) -> None:
        assert self.choose(b=(0, 320), c=(0, 608), d=(0, 304)) == "c"

    def test_of_equal_prefixes_the_less_loaded(self) -> None:
        assert self.choose(b=(9, 608), c=(8, 608)) == "c"

    def test_a_cold_prompt_goes_to_the_least_loaded_and_equals_take_turns(self) -> None:
        policy = PrefixHash(PrefixHash.Options())
        assert [policy.choose(request(), views(b=(5, 0)), 0.0) for _ in range(4)] == [*"acda"]

    def test_what_every_prompt_begins_with_is_no_match(self) -> None:
        assert self.choose(a=(1, 159), b=(1, 0), c=(1, 0)) == "d"
        assert self.choose(a=(1, 160), b=(1, 0), c=(1, 0)) == "a"

    def test_over_the_bound_the_cheapest_wins_and_that_may_be_the_warm_one(self) -> None:
        """32 new tokens behind 500 in flight come before 640 new ones behind none."""
        assert self.choose(a=(500, 608)) == "a"
        assert self.choose(a=(700, 608), b=(200, 0), c=(200, 0), d=(10, 0)) == "d"

    def test_under_the_bound_the_warm_one_has_a_right_to_its_prefix(self) -> None:
        busy: dict[str, Any] = {"b": (1000, 0), "c": (1000, 0), "d": (200, 0)}
        assert self.choose(a=(900, 320), **busy) == "a"

    def test_a_spilled_prefix_finds_the_same_second_home(self) -> None:
        ask = request(prefix_hashes=(b"x" * 32,))
        homes = {self.choose(ask=ask, a=(5000, 608)) for _ in range(20)}
        assert len(homes) == 1 and homes <= {"b", "c", "d"}
        others = {
            self.choose(ask=request(prefix_hashes=(bytes([n]) * 32,)), a=(5000, 608))
            for n in range(40)
        }
        assert others == {"b", "c", "d"}

    def test_loads_are_bounded(self) -> None:
        """However popular one prefix is, no replica runs further ahead than a prompt of the lowest."""
        policy = PrefixHash(PrefixHash.Options())
        loads = dict.fromkeys(ALL, 0)
        seen: set[str] = set()
        for _ in range(400):
            now: dict[str, Any] = {each: (loads[each], 608 * (each in seen)) for each in ALL}
            offered = views(**now)
            chosen = policy.choose(request(), offered, 0.0)
            loads[chosen] += 32 if chosen in seen else 640
            seen.add(chosen)
            mean = sum(loads.values()) / len(loads)
            assert max(loads.values()) <= max(1.25 * mean + 640, min(loads.values()) + 1280)
        assert seen == set(ALL)

    def test_new_prefixes_avoid_the_busy_replica(self) -> None:
        """R02: load is work in flight; a big cache is no load and an idle replica no danger."""
        policy = PrefixHash(PrefixHash.Options())
        loads = {"a": 8 * 4000, "b": 0}
        chosen: collections.Counter[str] = collections.Counter()
        for _ in range(20):
            offered = views(("a", "b"), **{each: (loads[each], 0) for each in loads})
            choice = policy.choose(request(), offered, 0.0)
            loads[choice] += 640
            chosen[choice] += 1
        assert chosen == {"b": 20}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"load_factor": 1.0}, "load_factor must be above 1"),
            ({"min_match": 2.0}, "between 0 and 1"),
        ],
    )
    def test_options(self, options: dict[str, float], message: str) -> None:
        with pytest.raises(PluginError, match=message):
            make("prefix_hash", **options)


def test_removing_a_replica_moves_only_its_sessions() -> None:
    """R08: and a new one takes its share of each of the others'."""
    policy = Session()

    def homes(ids: Sequence[str]) -> dict[str, str]:
        sessions = [f"session-{n}" for n in range(1000)]
        return {
            each: policy.choose(request(session=each, tenant="t"), views(ids), 0.0)
            for each in sessions
        }

    before, after = homes(ALL), homes(("a", "b", "d"))
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, home in before.items() if home == "c"}
    assert 190 < len(moved) < 310
    assert set(collections.Counter(after[session] for session in moved)) == {"a", "b", "d"}


def test_sessions_of_different_tenants_are_different_sessions() -> None:
    policy = Session()
    homes = {
        policy.choose(request(session="1", tenant=f"tenant-{n}"), views(), 0.0) for n in range(50)
    }
    assert homes == set(ALL)
    assert policy.choose(request(), views(a=(1, 0), b=(1, 0), c=(1, 0)), 0.0) == "d"


def test_least_loaded_looks_at_tokens() -> None:
    policy = make("least_loaded")
    assert policy.choose(request(), views(a=(9, 0), b=(3, 0), c=(4, 0), d=(5, 0)), 0.0) == "b"
    assert [policy.choose(request(), views(), 0.0) for _ in range(4)] == [*"cdab"]


def test_power_of_two_never_takes_the_worst() -> None:
    policy = make("power_of_two", seed=1)
    offered = views(a=(9, 0), b=(3, 0), c=(4, 0), d=(5, 0))
    chosen = collections.Counter(policy.choose(request(), offered, 0.0) for _ in range(300))
    assert chosen["a"] == 0 and chosen["b"] > chosen["c"] > chosen["d"] > 0
    assert policy.choose(request(), offered[:1], 0.0) == "a"


def test_cost_counts_unseen_prefill_and_active_blocks() -> None:
    policy = make("cost")
    busy = ReplicaView("a", matched_tokens=320, num_active_blocks=21)
    cold = ReplicaView("b", num_prefill_tokens=0, num_active_blocks=0)
    assert policy.choose(request(320), [busy, cold], 0.0) == "b"  # 21 against 20 blocks
    assert make("cost", prefill_weight=2.0).choose(request(320), [busy, cold], 0.0) == "a"


def test_cost_with_temperature_draws_the_cheaper_more_often() -> None:
    offered = [
        ReplicaView(each, num_active_blocks=blocks) for each, blocks in [("a", 0), ("b", 10)]
    ]
    policy = make("cost", temperature=10.0, seed=3)
    share = sum(policy.choose(request(0), offered, 0.0) == "a" for _ in range(2000)) / 2000
    assert share == pytest.approx(1 / (1 + 2.718281828**-1), abs=0.04)
    with pytest.raises(PluginError, match="temperature must be at least 0"):
        make("cost", temperature=-1.0)


GOLDEN = {
    "cost": "b7e1f0fc",
    "least_loaded": "2281db99",
    "power_of_two": "1d8e914d",
    "prefix_hash": "37286cc2",
    "random": "112f0d50",
    "round_robin": "edca6826",
    "session": "8ef78d5d",
}


@pytest.mark.parametrize("name", REGISTRIES.routing.names())
def test_a_run_is_what_it_was(name: str) -> None:
    """The choices of 500 requests over changing loads, as a digest: a change of rule is no accident."""
    seeded = name in ("power_of_two", "random", "cost")
    policy = make(name, **({"seed": 7} if seeded else {}))
    rng = random.Random(11)
    chosen = []
    for _ in range(500):
        ids = rng.sample(ALL, rng.randint(2, 4))
        offered = [
            ReplicaView(
                each,
                num_tokens=rng.choice([0, 0, 500, 900]),
                matched_tokens=rng.choice([0, 0, 160, 608]),
                num_active_blocks=rng.choice([0, 10, 60]),
            )
            for each in ids
        ]
        ask = request(session=f"s{rng.randint(0, 9)}", prefix_hashes=(rng.randbytes(32),))
        chosen.append(policy.choose(ask, offered, 0.0))
    assert hashlib.blake2b("".join(chosen).encode(), digest_size=4).hexdigest() == GOLDEN[name]
