"""Which blocks each sequence holds: prefix hits, growth, forks and return, over one block pool.

A block is published only once a step's result says that its rows are computed, and only when full,
so that what a half-computed request leaves behind is either right or not findable.
"""

from __future__ import annotations

from headrace import prefix_hash
from headrace.engine.block_pool import BlockPool, ParentKey
from headrace.engine.sequence import Sequence
from headrace.interfaces import EvictionPolicy
from headrace.prefix_hash import packed_block_digest


class KVCache:
    """Per-sequence logic over the pool. All KV groups use the same blocks of a sequence for now."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_revision: str,
        prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, eviction)
        self.block_size = block_size
        self._model_revision = model_revision
        self._prefix_caching = prefix_caching
        self.query_tokens_total = 0
        self.hit_tokens_total = 0

    def blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.block_size)

    def blocks_to_finish(self, sequence: Sequence) -> int:
        """Return how many further blocks the known tokens and the next one need."""
        rows = sequence.num_kv_rows() + sequence.num_pending_tokens + 1
        return self.blocks_for(rows) - len(sequence.block_ids)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the sequence's prefix, taking none: at most length - 1 tokens."""
        if not self._reads_cache(sequence):
            return []
        hits, serials = sequence.found_blocks, sequence.found_serials
        if sequence.found_at == (self.pool.num_changes, sequence.num_tokens):
            return hits
        sequence.found_at = (self.pool.num_changes, sequence.num_tokens)
        num_intact = self.pool.num_intact(hits, serials)
        del hits[num_intact:], serials[num_intact:]
        parent: ParentKey = serials[-1] if serials else self._root(sequence)
        size = self.block_size
        digests = sequence.block_digests or self._begin_digests(sequence)
        most = (sequence.num_tokens - 1) // size
        known = digests[num_intact:most]
        end = num_intact + len(known)
        if known:
            tokens = sequence.token_ids[num_intact * size : end * size].tobytes()
            found, their_serials = self.pool.find_chain(known, parent, tokens)
            hits += found
            serials += their_serials
            if len(found) < len(known):
                return hits
            parent = serials[-1]
        for index in range(end, most):
            digest = self._digest(sequence, index)
            block = self.pool.lookup(digest, parent, self._tokens(sequence, index))
            if block is None:
                break
            hits.append(block.id)
            parent = block.serial
            serials.append(parent)
        return hits

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Return how many free blocks starting this sequence takes up, hits that are free included."""
        held = self.pool.num_held(self.cached_blocks(sequence))
        return self.blocks_for(sequence.num_tokens + 1) - held

    def begin(self, sequence: Sequence) -> None:
        """Take the blocks that hold the sequence's prefix. Only a first start counts as a query."""
        assert not sequence.block_ids, "a sequence begins without blocks"
        hits = self.cached_blocks(sequence)
        self.pool.hit(hits)
        sequence.has_begun = True
        sequence.block_ids.extend(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published = len(hits)
        sequence.parent = self.pool.block(hits[-1]).serial if hits else self._root(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self._reads_cache(sequence):
                self.query_tokens_total += sequence.num_tokens
                self.hit_tokens_total += sequence.num_cached_tokens

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` more rows; False (and no change) where too few blocks are free."""
        missing = self.blocks_for(sequence.num_kv_rows() + num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return True
        block_ids = self.pool.try_allocate(missing)
        if block_ids is None:
            return False
        sequence.block_ids.extend(block_ids)
        return True

    def rows_available(self, sequence: Sequence) -> int:
        """Return how many more rows the sequence could hold if it took every free block."""
        blocks = len(sequence.block_ids) + self.pool.num_free
        return blocks * self.block_size - sequence.num_kv_rows()

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks that are computed findable for others."""
        num_full = sequence.num_computed_tokens // self.block_size
        if not self._prefix_caching or num_full <= sequence.num_published:
            return
        pool, request = self.pool, sequence.family.request
        for index in range(sequence.num_published, num_full):
            block_id = sequence.block_ids[index]
            pool.describe(block_id, request.tenant, request.priority, index)
            digest, tokens = self._digest(sequence, index), self._tokens(sequence, index)
            sequence.parent = pool.publish(block_id, digest, sequence.parent, tokens)
        sequence.num_published = num_full

    def try_fork(self, source: Sequence, target: Sequence) -> list[tuple[int, int]] | None:
        """Let `target` go on from what `source` has computed.

        Full blocks are shared. Returns the (source, target) pair of the partial last block, which
        has to be copied before either writes; None (and no change) where no block is free for it.
        """
        num_full, num_partial_rows = divmod(source.num_kv_rows(), self.block_size)
        own: list[int] | None = []
        if num_partial_rows:
            own = self.pool.try_allocate(1)
        if own is None:
            return None
        shared = source.block_ids[:num_full]
        self.pool.share(shared)
        target.block_ids = shared + own
        target.num_table_blocks = 0
        target.has_begun = True
        target.num_computed_tokens = source.num_computed_tokens
        target.num_published = source.num_published
        target.parent = source.parent
        target.block_digests = source.block_digests[:num_full]
        return [(source.block_ids[num_full], own[0])] if own else []

    def free(self, sequence: Sequence) -> None:
        """Return the sequence's blocks, the tail first; it may begin again later.

        A request with `cache_ttl_seconds` asks for its prompt's blocks to be kept so long from now.
        """
        ttl = sequence.request.cache_ttl_seconds
        if ttl is not None:
            num_blocks = len(sequence.request.prompt_token_ids) // self.block_size
            self.pool.pin(sequence.block_ids[:num_blocks], self.pool.now + ttl)
        self.pool.release(reversed(sequence.block_ids))
        sequence.forget_computed()

    def withdraw(self, sequence: Sequence) -> None:
        """Make the sequence's blocks unfindable, because their contents are wrong; it keeps them."""
        self.pool.withdraw(sequence.block_ids)

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Prompt log probabilities need every prompt row computed, so such a request reads nothing."""
        return self._prefix_caching and sequence.request.sampling.prompt_logprobs is None

    def _root(self, sequence: Sequence) -> bytes:
        if not sequence.root_digest:
            sequence.root_digest = prefix_hash.root_digest(
                model_revision=self._model_revision, salt=sequence.request.cache_salt
            )
        return sequence.root_digest

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        start = index * self.block_size
        return sequence.token_ids[start : start + self.block_size].tobytes()

    def _given_digests(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Return the digests of the prompt's blocks where the gateway has computed all of them."""
        request = sequence.request
        num_blocks = len(request.prompt_token_ids) // self.block_size
        return request.prefix_hashes if len(request.prefix_hashes) == num_blocks else ()

    def _begin_digests(self, sequence: Sequence) -> list[bytes]:
        sequence.block_digests.extend(self._given_digests(sequence))
        return sequence.block_digests

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        digests = sequence.block_digests or self._begin_digests(sequence)
        while len(digests) <= index:
            parent = digests[-1] if digests else self._root(sequence)
            digests.append(packed_block_digest(parent, self._tokens(sequence, len(digests))))
        return digests[index]
