"""Random loads on tiny pools: every answer is the one the request gets alone, and nothing leaks."""

from __future__ import annotations

import functools
import gc
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sequence import Sequence
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.testing.engine_driver import EngineDriver, make_engine_driver

POOL: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_model_len": 56}


@functools.cache
def expected(prompt: tuple[int, ...], n: int, seed: int, penalty: float) -> list[list[int]]:
    driver = make_engine_driver(64, block_size=4, prefix_caching=False)
    name = driver.submit(
        list(prompt), n=n, seed=seed, temperature=1.0, presence_penalty=penalty, max_tokens=12
    )
    driver.run()
    return [driver.tokens(name, index) for index in range(n)]


def check_pool(driver: EngineDriver) -> None:
    """Every block is held as often as sequences list it, and no two write the same one."""
    scheduler = driver.engine._scheduler
    pool = scheduler.kv_cache.pool
    held = [block for sequence in scheduler.running for block in sequence.block_ids]
    for block_id in range(pool.num_blocks):
        assert pool.block(block_id).ref_count == held.count(block_id)
    assert pool.num_free == pool.num_blocks - len(set(held))
    for sequence in scheduler.running:
        size = scheduler.kv_cache.block_size
        assert sequence.num_computed_tokens <= len(sequence.block_ids) * size
        last_full = sequence.num_computed_tokens // size
        for block_id in sequence.block_ids[last_full:]:
            assert pool.block(block_id).ref_count == 1
            assert pool.block(block_id).digest is None
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(slots) == len(set(slots)) == scheduler.num_slots - scheduler.num_free_slots


request_strategy = st.tuples(
    st.integers(0, 3),  # which beginning
    st.integers(1, 24),  # prompt length
    st.integers(1, 3),  # n
    st.integers(0, 3),  # seed
    st.sampled_from([0.0, 0.7]),  # penalty
    st.integers(0, 2),  # priority
    st.integers(0, 6),  # steps before the next one
    st.integers(0, 9),  # abort: 0 at once, 1..3 that many steps later, else never
)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(request_strategy, min_size=1, max_size=14),
    slots=st.integers(1, 6),
    budget=st.integers(1, 24),
    prefix_caching=st.booleans(),
    by_priority=st.booleans(),
)
def test_any_load_gives_each_request_its_own_answer(
    requests: list[tuple[int, ...]],
    slots: int,
    budget: int,
    prefix_caching: bool,
    by_priority: bool,
) -> None:
    driver = make_engine_driver(
        **POOL,
        max_num_sequences=slots,
        max_batched_tokens=budget,
        prefix_caching=prefix_caching,
        policy=PriorityFirst() if by_priority else None,
    )
    wanted: dict[str, list[list[int]]] = {}
    aborts: dict[str, int] = {}

    def step() -> None:
        for name in [name for name, when in aborts.items() if when == 0]:
            del aborts[name]
            driver.engine.abort(name)
        driver.step()
        check_pool(driver)
        for name in aborts:
            aborts[name] -= 1

    for start, length, n, seed, penalty, priority, pause, abort in requests:
        prompt = tuple(1 + (start * 31 + i) % 200 for i in range(length))
        name = driver.submit(
            list(prompt), n=n, seed=seed, temperature=1.0, presence_penalty=penalty,
            max_tokens=12, priority=priority,
        )  # fmt: skip
        if abort < 4:
            aborts[name] = abort
        else:
            wanted[name] = expected(prompt, n, seed, penalty)
        for _ in range(pause):
            step()
    while driver.engine.has_work():
        step()
    for name, choices in wanted.items():
        assert [driver.tokens(name, index) for index in range(len(choices))] == choices
    driver.assert_empty()


def count_sequences() -> int:
    gc.collect()
    return sum(type(thing) is Sequence for thing in gc.get_objects())


def test_a_thousand_requests_with_aborts_leave_nothing_behind() -> None:
    """K09: blocks, slots and objects all come back."""
    driver = make_engine_driver(48, block_size=4, max_model_len=128, max_batched_tokens=48)
    choice = random.Random(5)

    def one_round() -> int:
        names: list[str] = []
        for _ in range(250):
            prompt = [choice.randrange(1, 300) for _ in range(choice.randrange(1, 60))]
            if driver.engine.has_room(2):
                names.append(
                    driver.submit(
                        prompt, max_tokens=choice.randrange(1, 40), n=choice.choice([1, 2])
                    )
                )
            for _ in range(choice.randrange(6)):
                driver.step()
            if names and choice.random() < 0.3:
                driver.engine.abort(names.pop(choice.randrange(len(names))))
        driver.run()
        driver.events.clear()
        driver.assert_empty()
        return count_sequences() - before

    before = count_sequences()
    one_round()
    most = driver.engine._scheduler.num_slots  # the batch builder knows the last one of each slot
    assert all(one_round() <= most for _ in range(3))
    stats = driver.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prompt_tokens_total > 0
