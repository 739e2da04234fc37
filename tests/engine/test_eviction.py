"""An eviction policy orders what is reusable; whatever it says, cached stays equal to uncached."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.block_pool import BlockPool
from headrace.interfaces import EvictionPolicy
from headrace.policies.eviction.lfu import LeastFrequentlyUsed
from headrace.policies.eviction.lru import LeastRecentlyUsed
from headrace.policies.eviction.priority_ttl import PriorityAndTime
from headrace.policy_guard import EvictionGuard, GuardLimits
from headrace.testing.engine_driver import generate_alone, make_engine_driver, random_prompt
from headrace.types import BlockView

ROOT = b"root"


class InReverse:
    """The most recently used goes first, by a key; changes its mind when asked to."""

    name: ClassVar[str] = "in_reverse"

    def key(self, block: BlockView, now: float) -> tuple[float, float | None]:
        return -block.last_used, None


class Whimsical:
    """Keeps the contract and nothing else."""

    name: ClassVar[str] = "whimsical"

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)

    def key(self, block: BlockView, now: float) -> tuple[float, float | None]:
        again = now + self.choice.random() if self.choice.random() < 0.5 else None
        return self.choice.random(), again


def publish_one(pool: BlockPool, name: bytes, **facts: Any) -> int:
    """Compute and let go of one block that holds `name`."""
    [block_id] = pool.try_allocate(1) or [-1]
    described = {"tenant": "", "priority": 0, "depth": 0, **facts}
    pool.describe(block_id, **described)
    pool.publish(block_id, name, ROOT, name)
    pool.release([block_id])
    return block_id


def holds(pool: BlockPool, name: bytes) -> bool:
    return pool.lookup(name, ROOT, name) is not None


def use_again(pool: BlockPool, name: bytes) -> None:
    block = pool.lookup(name, ROOT, name)
    assert block is not None
    pool.hit([block.id])
    pool.release([block.id])


def evict_all(pool: BlockPool, names: list[bytes]) -> list[bytes]:
    """Return the names in the order in which they are evicted."""
    order = []
    left = list(names)
    for _ in names:
        pool.try_allocate(1)
        [gone] = [name for name in left if not holds(pool, name)]
        left.remove(gone)
        order.append(gone)
    return order


def test_release_order_needs_no_key_and_gives_the_same_as_asking_for_it() -> None:
    class Asked(LeastRecentlyUsed):
        is_release_order: ClassVar[bool] = False

    rng = random.Random(0)
    plain, keyed = BlockPool(12, LeastRecentlyUsed()), BlockPool(12, Asked())
    names = [bytes([65 + number]) for number in range(12)]
    for pool in (plain, keyed):
        rng = random.Random(0)
        for number, name in enumerate(names):
            pool.now = float(number)
            publish_one(pool, name)
        for number in range(40):
            pool.now = 20.0 + number // 3
            use_again(pool, rng.choice(names))
    assert plain.free_ids() == keyed.free_ids()
    assert evict_all(plain, names) == evict_all(keyed, names)


def test_what_nobody_looks_for_is_reused_before_any_known_prefix() -> None:
    pool = BlockPool(4, InReverse())
    for name in (b"a", b"b"):
        pool.now += 1
        publish_one(pool, name)
    assert pool.num_free == 4
    taken = pool.try_allocate(2)
    assert holds(pool, b"a") and holds(pool, b"b")
    pool.release(taken or [])
    assert pool.try_allocate(3) is not None
    assert (holds(pool, b"a"), holds(pool, b"b")) == (True, False)


def test_frequent_blocks_outlive_recent_ones_until_they_age() -> None:
    def after(seconds: float) -> list[bytes]:
        pool = BlockPool(2, LeastFrequentlyUsed(LeastFrequentlyUsed.Options(half_life=100.0)))
        publish_one(pool, b"often")
        for _ in range(3):
            use_again(pool, b"often")
        pool.now = seconds
        publish_one(pool, b"lately")
        return evict_all(pool, [b"often", b"lately"])

    assert after(150.0) == [b"lately", b"often"]
    assert after(250.0) == [b"often", b"lately"]


def test_pins_hold_for_their_time_and_quotas_come_before_them() -> None:
    options = PriorityAndTime.Options(
        pinned_priority=-1, ttl=10.0, quotas={"greedy": 0.2}, recheck=1.0
    )
    facts: dict[bytes, dict[str, Any]] = {
        b"pinned": {"priority": -1},
        b"urgent": {"priority": 0},
        b"later": {"priority": 3},
        b"greedy-1": {"tenant": "greedy", "priority": -1},
        b"greedy-2": {"tenant": "greedy", "priority": -1},
    }

    def order(seconds: float) -> list[bytes]:
        pool = BlockPool(5, PriorityAndTime(options))
        for name, values in facts.items():
            publish_one(pool, name, **values)
        pool.now = seconds
        return evict_all(pool, list(facts))

    assert order(5.0) == [b"greedy-2", b"later", b"urgent", b"pinned", b"greedy-1"]
    assert order(15.0)[-3:] == [b"later", b"urgent", b"pinned"]


def test_a_request_can_ask_for_its_prompt_to_be_kept() -> None:
    def hits_after_others(ttl: float | None, **options: Any) -> int:
        driver = make_engine_driver(
            16, block_size=4, max_model_len=64, eviction=PriorityAndTime(), **options
        )
        keep = random_prompt(17)
        driver.generate(keep, max_tokens=1, cache_ttl_seconds=ttl)
        for seed in range(1, 6):
            driver.generate(random_prompt(17, seed), max_tokens=1)
        driver.generate(keep, max_tokens=1)
        return driver.engine.stats().prefix_hit_tokens_total

    assert hits_after_others(None) == 0
    assert hits_after_others(60.0) == 16
    assert hits_after_others(1e-6) == 0


POLICIES: list[Any] = [
    lambda: None,
    LeastRecentlyUsed,
    LeastFrequentlyUsed,
    lambda: PriorityAndTime(PriorityAndTime.Options(pinned_priority=0, ttl=0.05, recheck=0.01)),
    InReverse,
    lambda: Whimsical(1),
    lambda: EvictionGuard(Whimsical(2), LeastRecentlyUsed()),
]


@pytest.mark.parametrize("make", POLICIES)
def test_cached_equals_uncached_under_every_policy(make: Any) -> None:
    rng = random.Random(5)
    driver = make_engine_driver(24, block_size=4, max_model_len=64, eviction=make())
    prompts = {}
    for number in range(30):
        prompt = random_prompt(24, rng.randrange(4))[: rng.randint(5, 24)]
        prompt += random_prompt(3, rng.randrange(3))
        prompts[driver.submit(prompt, max_tokens=6)] = prompt
        if number % 3 == 2:
            driver.run()
    driver.run()
    assert driver.engine.stats().prefix_hit_tokens_total > 0
    for name, prompt in prompts.items():
        assert driver.tokens(name) == generate_alone(prompt, max_tokens=6)
    driver.assert_empty()


@given(st.integers(0, 10**9))
def test_blocks_are_neither_lost_nor_doubled(seed: int) -> None:
    choice = random.Random(seed)
    policies: list[EvictionPolicy] = [Whimsical(seed), LeastRecentlyUsed(), InReverse()]
    guard = EvictionGuard(policies[0], LeastRecentlyUsed())
    pool = BlockPool(10, guard)
    held: list[list[int]] = []
    names = 0
    for _ in range(60):
        pool.now += choice.random()
        action = choice.random()
        if action < 0.4 and (taken := pool.try_allocate(choice.randint(1, 3))):
            held.append(taken)
            for block_id in taken[: choice.randint(0, 3)]:
                names += 1
                name = names.to_bytes(2, "big")
                pool.describe(block_id, choice.choice("ab"), choice.randint(-1, 1), 0)
                pool.publish(block_id, name, ROOT, name)
        elif action < 0.7 and held:
            pool.release(held.pop(choice.randrange(len(held))))
        elif action < 0.8:
            known = [b for b in range(10) if pool.block(b).digest is not None]
            if known:
                held.append([choice.choice(known)])
                pool.hit(held[-1])
        elif action < 0.9:
            pool.withdraw([choice.randrange(10)])
        else:
            guard.swap(choice.choice(policies))
        busy = {block_id for group in held for block_id in group}
        assert sorted(pool.free_ids()) == sorted(set(range(10)) - busy)
        assert pool.num_free == 10 - len(busy)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "the key is no"),
        ((float("nan"), None), "the value is no number"),
        (("a", None), "the value is no number"),
        ((1.0, -1.0), "which is past"),
        ((1.0, "soon"), "the time is no number"),
    ],
)
def test_nonsense_is_replaced_and_a_benched_policy_orders_nothing(answer: Any, reason: str) -> None:
    class Odd(InReverse):
        name = "odd"

        def key(self, block: BlockView, now: float) -> Any:
            return answer

    guard = EvictionGuard(Odd(), LeastRecentlyUsed(), GuardLimits(max_strikes=2))
    pool = BlockPool(4, guard)
    names = [b"a", b"b", b"c", b"d"]
    with structlog.testing.capture_logs() as logs:
        for name in names:
            pool.now += 1
            publish_one(pool, name)
    assert reason in logs[0]["reason"]
    assert guard.is_benched
    assert evict_all(pool, names) == names
    assert guard.failures_total == 2
