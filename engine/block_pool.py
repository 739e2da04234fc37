"""The KV blocks of a pool: who holds them, which are reusable, and which hold a known prefix.

The free list is the eviction order. A block nobody will look for (never published) is reused
first, so that it costs no cached prefix; published ones follow in the order they became free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

ParentKey = bytes | int
"""What precedes a block: the root digest of its chain, or the serial of the block before it."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV rows. `digest` is None until its contents are published."""

    id: int
    ref_count: int = 0
    digest: bytes | None = None
    parent: ParentKey = b""
    token_ids: tuple[int, ...] = ()
    serial: int = -1
    """Unique to this publication: children name it, so a chain is verified link by link."""


class BlockPool:
    """All blocks of one pool. Every method is O(blocks it names)."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, Block] = {}
        self._next_serial = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_published(self) -> int:
        return len(self._by_digest)

    @property
    def num_publications(self) -> int:
        """How often a block has become findable."""
        return self._next_serial

    def block(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def free_ids(self) -> list[int]:
        """Return the free blocks in the order in which they would be reused."""
        return list(self._free)

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, forgetting what they held; None (and no change) if too few."""
        if count > len(self._free):
            return None
        block_ids = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            block = self._blocks[block_id]
            self._forget(block)
            block.ref_count = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; a free one leaves the free list with its contents."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a holder of each block, in order. Pass a chain's tail first: it is evicted first."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} was released more often than taken"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=block.digest is not None)

    def lookup(self, digest: bytes, parent: ParentKey, token_ids: tuple[int, ...]) -> Block | None:
        """Return the block published under `digest` if it really follows `parent` with these tokens."""
        block = self._by_digest.get(digest)
        if block is None or block.parent != parent or block.token_ids != token_ids:
            return None
        return block

    def publish(
        self, block_id: int, digest: bytes, parent: ParentKey, token_ids: tuple[int, ...]
    ) -> int:
        """Make a full block findable and return the serial that its children name as parent.

        Where the same contents are published already, that block stays the one to be found. Where
        another prefix holds the digest (its parent was evicted, or a collision), this one replaces it.
        """
        known = self._by_digest.get(digest)
        if known is not None:
            if known.parent == parent and known.token_ids == token_ids:
                return known.serial
            self._forget(known)
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is published without a holder"
        self._forget(block)
        block.digest, block.parent, block.token_ids = digest, parent, token_ids
        block.serial = self._next_serial
        self._next_serial += 1
        self._by_digest[digest] = block
        return block.serial

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, because their contents turned out to be wrong."""
        for block_id in block_ids:
            self._forget(self._blocks[block_id])

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._by_digest[block.digest]
            block.digest, block.parent, block.token_ids, block.serial = None, b"", (), -1
