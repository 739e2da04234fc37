"""The KV blocks of a pool: who holds them, which are reusable, and which hold a known prefix.

The free list is the eviction order. A block nobody will look for (never published) is reused
first, so that it costs no cached prefix; published ones follow in the order they became free, or in
the order an eviction policy gives them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.engine.eviction import KeyedOrder
from headrace.interfaces import EvictionPolicy
from headrace.types import BlockView

ParentKey = bytes | int
"""What precedes a block: the root digest of its chain, or the serial of the block before it."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV rows. `digest` is None until its contents are published."""

    id: int
    ref_count: int = 0
    digest: bytes | None = None
    parent: ParentKey = b""
    tokens: bytes = b""
    """As an array of typecode I has them in memory, which is compared in no time."""
    serial: int = -1
    """Unique to this publication: children name it, so a chain is verified link by link."""
    tenant: str = ""
    priority: int = 0
    depth: int = 0
    hits: int = 0
    last_used: float = 0.0
    pinned_until: float = 0.0


class BlockPool:
    """All blocks of one pool. Every method is O(blocks it names), times O(log blocks) where an
    eviction policy has an order of its own."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None) -> None:
        """`eviction`: guarded or not; None: in order of release."""
        self.now = 0.0
        """Set by whoever steps: when blocks are used and policies asked."""
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._eviction = eviction
        self._epoch = -1
        self._keyed: KeyedOrder | None = None
        self._tenant_blocks: dict[str, int] = {}
        self._view = BlockView(0)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, Block] = {}
        self._next_serial = 0
        self._num_forgotten = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free) + (0 if self._keyed is None else len(self._keyed))

    @property
    def num_published(self) -> int:
        return len(self._by_digest)

    @property
    def num_publications(self) -> int:
        """How often a block has become findable."""
        return self._next_serial

    @property
    def num_changes(self) -> int:
        """How often a block has become findable, or has ceased to be: while equal, lookups give the same."""
        return self._next_serial + self._num_forgotten

    def block(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def num_held(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have a holder."""
        blocks = self._blocks
        return sum([blocks[block_id].ref_count > 0 for block_id in block_ids])

    def free_ids(self) -> list[int]:
        """Return the free blocks in the order in which they would be reused."""
        self._follow_policy()
        return [*self._free, *(self._keyed or ())]

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, forgetting what they held; None (and no change) if too few."""
        if count > self.num_free:
            return None
        self._follow_policy()
        blocks, first_free = self._blocks, self._first_free
        block_ids = []
        for _ in range(count):
            block_id = first_free()
            block = blocks[block_id]
            if block.digest is not None:
                self._forget(block)
            block.ref_count = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; a free one leaves the free list with its contents."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._leave(block_id)
            block.ref_count += 1

    def hit(self, block_ids: Iterable[int]) -> None:
        """Add a holder who found these blocks by what they hold."""
        blocks, free, keyed = self._blocks, self._free, self._keyed
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count == 0:
                if keyed is None:
                    del free[block_id]
                else:
                    self._leave(block_id)
            block.ref_count += 1
            block.hits += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a holder of each block, in order. Pass a chain's tail first: it is evicted first."""
        blocks, free, now, keyed = self._blocks, self._free, self.now, self._keyed
        for block_id in block_ids:
            block = blocks[block_id]
            num_left = block.ref_count = block.ref_count - 1
            if num_left:
                assert num_left > 0, f"block {block_id} was released more often than taken"
                continue
            block.last_used = now
            if block.digest is None:
                free[block_id] = None
                free.move_to_end(block_id, last=False)
            elif keyed is None:
                free[block_id] = None  # it was not there, so it is the last now
            else:
                keyed.add(block_id, now)

    def lookup(self, digest: bytes, parent: ParentKey, tokens: bytes) -> Block | None:
        """Return the block published under `digest` if it really follows `parent` with these tokens."""
        block = self._by_digest.get(digest)
        if block is None or block.parent != parent or block.tokens != tokens:
            return None
        return block

    def find_chain(
        self, digests: Sequence[bytes], parent: ParentKey, tokens: bytes
    ) -> tuple[list[int], list[int]]:
        """Return the ids and serials of the blocks that `lookup` finds one behind the other.

        `tokens` has those of all these digests' blocks.
        """
        get = self._by_digest.get
        block_ids: list[int] = []
        serials: list[int] = []
        start, size = 0, len(tokens) // len(digests)
        for digest in digests:
            block = get(digest)
            end = start + size
            if block is None or block.parent != parent or block.tokens != tokens[start:end]:
                break
            block_ids.append(block.id)
            parent = block.serial
            serials.append(parent)
            start = end
        return block_ids, serials

    def num_intact(self, block_ids: list[int], serials: list[int]) -> int:
        """Return how many of these blocks, from the first on, are still published as they were."""
        blocks = self._blocks
        now = [blocks[block_id].serial for block_id in block_ids]
        if now == serials:
            return len(now)
        return next(
            place for place, pair in enumerate(zip(now, serials, strict=True)) if pair[0] != pair[1]
        )

    def publish(self, block_id: int, digest: bytes, parent: ParentKey, tokens: bytes) -> int:
        """Make a full block findable and return the serial that its children name as parent.

        Where the same contents are published already, that block stays the one to be found. Where
        another prefix holds the digest (its parent was evicted, or a collision), this one replaces it.
        """
        known = self._by_digest.get(digest)
        if known is not None:
            if known.parent == parent and known.tokens == tokens:
                return known.serial
            self._forget(known)
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is published without a holder"
        self._forget(block)
        block.digest, block.parent, block.tokens = digest, parent, tokens
        block.serial = self._next_serial
        self._next_serial += 1
        self._by_digest[digest] = block
        self._tenant_blocks[block.tenant] = self._tenant_blocks.get(block.tenant, 0) + 1
        return block.serial

    def describe(self, block_id: int, tenant: str, priority: int, depth: int) -> None:
        """Say whose block this is and how many precede it in its chain. Call before `publish`."""
        block = self._blocks[block_id]
        if block.digest is None:
            block.tenant, block.priority, block.depth = tenant, priority, depth
            block.hits, block.pinned_until = 0, 0.0

    def pin(self, block_ids: Iterable[int], until: float) -> None:
        """Note that a request asked for these blocks to be kept until a time; the policy weighs it."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.pinned_until = max(block.pinned_until, until)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, because their contents turned out to be wrong."""
        for block_id in block_ids:
            self._forget(self._blocks[block_id])

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            self._num_forgotten += 1
            del self._by_digest[block.digest]
            block.digest, block.parent, block.tokens, block.serial = None, b"", b"", -1
            num_left = self._tenant_blocks[block.tenant] - 1
            if num_left:
                self._tenant_blocks[block.tenant] = num_left
            else:
                del self._tenant_blocks[block.tenant]
            if self._keyed is not None and block.id in self._keyed:
                self._keyed.remove(block.id)
                self._free[block.id] = None
                self._free.move_to_end(block.id, last=False)

    # --- the order --------------------------------------------------------------

    def _first_free(self) -> int:
        if self._free or self._keyed is None:
            return self._free.popitem(last=False)[0]
        return self._keyed.pop(self.now)

    def _leave(self, block_id: int) -> None:
        if self._keyed is not None and block_id in self._keyed:
            self._keyed.remove(block_id)
        else:
            del self._free[block_id]

    def _follow_policy(self) -> None:
        """Order the reusable blocks anew where another policy decides than before."""
        if self._eviction is None:
            return
        epoch = getattr(self._eviction, "epoch", 0)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        known = [block_id for block_id in self._free if self._blocks[block_id].digest is not None]
        known += self._keyed or ()
        known.sort(key=lambda block_id: self._blocks[block_id].last_used)
        for block_id in known:
            self._leave(block_id)
        chosen = getattr(self._eviction, "deciding", self._eviction)
        self._keyed = None
        if not getattr(chosen, "is_release_order", False):
            self._keyed = KeyedOrder(self._eviction, self._show)
        for block_id in known:
            if self._keyed is None:
                self._free[block_id] = None
            else:
                self._keyed.add(block_id, self.now)

    def _show(self, block_id: int) -> BlockView:
        block, view = self._blocks[block_id], self._view
        view.block_id, view.tenant, view.priority = block_id, block.tenant, block.priority
        view.depth, view.hits, view.last_used = block.depth, block.hits, block.last_used
        view.pinned_until = block.pinned_until
        view.tenant_share = self._tenant_blocks.get(block.tenant, 0) / len(self._blocks)
        return view
