"""Block pool: exact ids, eviction order, and invariants under random use."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.block_pool import BlockPool, ParentKey

ROOT = b"root"


def publish(pool: BlockPool, block_id: int, parent: ParentKey, tokens: bytes) -> int:
    return pool.publish(block_id, repr((parent, tokens)).encode(), parent, tokens)


def test_blocks_are_taken_from_the_front_of_the_free_list() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(3) == [0, 1, 2]
    assert pool.free_ids() == [3]


def test_too_few_free_blocks_change_nothing() -> None:
    pool = BlockPool(2)
    pool.try_allocate(1)
    assert pool.try_allocate(2) is None
    assert pool.free_ids() == [1]


def test_published_blocks_are_evicted_last_and_tails_before_heads() -> None:
    pool = BlockPool(6)
    first = pool.try_allocate(3)
    assert first == [0, 1, 2]
    serial = publish(pool, 0, ROOT, b"1")
    publish(pool, 1, serial, b"2")
    pool.release(reversed(first))  # block 2 was never published
    assert pool.free_ids() == [2, 3, 4, 5, 1, 0]


def test_allocation_forgets_what_the_block_held() -> None:
    pool = BlockPool(1)
    pool.try_allocate(1)
    publish(pool, 0, ROOT, b"1")
    pool.release([0])
    assert pool.lookup(repr((ROOT, b"1")).encode(), ROOT, b"1") is not None
    pool.try_allocate(1)
    assert pool.lookup(repr((ROOT, b"1")).encode(), ROOT, b"1") is None
    assert pool.num_published == 0


def test_a_shared_block_leaves_the_free_list_and_returns_with_its_last_holder() -> None:
    pool = BlockPool(3)
    pool.try_allocate(1)
    publish(pool, 0, ROOT, b"1")
    pool.release([0])
    pool.share([0])
    pool.share([0])
    assert pool.free_ids() == [1, 2]
    pool.release([0])
    assert pool.free_ids() == [1, 2]
    pool.release([0])
    assert pool.free_ids() == [1, 2, 0]


def test_a_hit_needs_the_same_tokens_and_the_same_parent() -> None:
    pool = BlockPool(2)
    pool.try_allocate(2)
    pool.publish(0, b"digest", ROOT, b"12")
    assert pool.lookup(b"digest", ROOT, b"13") is None
    assert pool.lookup(b"digest", 7, b"12") is None
    found = pool.lookup(b"digest", ROOT, b"12")
    assert found is not None and found.id == 0


def test_equal_contents_keep_the_first_block_and_its_serial() -> None:
    pool = BlockPool(2)
    pool.try_allocate(2)
    assert pool.publish(0, b"d", ROOT, b"1") == pool.publish(1, b"d", ROOT, b"1")
    assert pool.block(1).digest is None


def test_another_prefix_under_the_same_digest_replaces_the_older_one() -> None:
    pool = BlockPool(2)
    pool.try_allocate(2)
    pool.publish(0, b"d", ROOT, b"1")
    pool.publish(1, b"d", ROOT, b"2")
    assert pool.lookup(b"d", ROOT, b"1") is None
    found = pool.lookup(b"d", ROOT, b"2")
    assert found is not None and found.id == 1


def test_withdrawn_blocks_are_not_found() -> None:
    pool = BlockPool(1)
    pool.try_allocate(1)
    pool.publish(0, b"d", ROOT, b"1")
    pool.withdraw([0])
    assert pool.lookup(b"d", ROOT, b"1") is None


class PoolMachine(RuleBasedStateMachine):
    """Chains of holders over a small pool, against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.chains: list[list[int]] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        expected = self.pool.free_ids()[:count]
        block_ids = self.pool.try_allocate(count)
        if len(expected) < count:
            assert block_ids is None
        else:
            assert block_ids == expected
            self.chains.append(expected)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release(reversed(chain))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        self.pool.share(chain)
        self.chains.append(list(chain))

    @rule(token=st.integers(0, 2))
    def hit(self, token: int) -> None:
        block = self.pool.lookup(
            repr((ROOT, str(token).encode())).encode(), ROOT, str(token).encode()
        )
        if block is not None:
            assert block.tokens == str(token).encode()
            self.pool.share([block.id])
            self.chains.append([block.id])

    @precondition(lambda self: any(self.chains))
    @rule(data=st.data(), token=st.integers(0, 2))
    def publish(self, data: st.DataObject, token: int) -> None:
        chain = data.draw(st.sampled_from([chain for chain in self.chains if chain]))
        publish(self.pool, data.draw(st.sampled_from(chain)), ROOT, str(token).encode())

    @invariant()
    def counts_agree(self) -> None:
        held = Counter(block_id for chain in self.chains for block_id in chain)
        free = self.pool.free_ids()
        assert len(free) == len(set(free)) == self.pool.num_free
        for block_id in range(self.pool.num_blocks):
            assert self.pool.block(block_id).ref_count == held[block_id]
            assert (block_id in free) == (held[block_id] == 0)
        published = [b for i in range(7) if (b := self.pool.block(i)).digest is not None]
        assert len(published) == self.pool.num_published
        for block in published:
            assert block.digest is not None
            assert self.pool.lookup(block.digest, block.parent, block.tokens) is block


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
