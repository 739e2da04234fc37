"""Prompts from block ids: the same ids give the same tokens, and the digests of prompts are kept.

A block's tokens are all its id: what the KV cache compares is then as unequal as the blocks are, and a
prompt of a hundred thousand tokens is made in a moment.
"""

from __future__ import annotations

import sys
from array import array

from headrace import prefix_hash
from headrace.simulator.trace import HASH_BLOCK_TOKENS, TraceRequest

_MAX_KNOWN = 1 << 18
VOCAB_SIZE = 2**31 - 1


class PromptMaker:
    """Makes prompts for engines with one block size and one model revision."""

    def __init__(self, block_size: int, model_revision: str) -> None:
        self._size = block_size
        self._root = prefix_hash.root_digest(model_revision=model_revision)
        self._known: dict[tuple[bytes, int], tuple[bytes, ...]] = {}
        self._num_unshared = 0

    def make(self, request: TraceRequest) -> tuple[array[int], tuple[bytes, ...]]:
        """Return a prompt's tokens and the digests of its full blocks."""
        length = request.num_prompt_tokens
        ids = request.hash_ids or self._unshared(length)
        tokens = array("I")
        tokens.frombytes(b"".join([_tokens_of(block_id) * HASH_BLOCK_TOKENS for block_id in ids]))
        del tokens[length:]
        return tokens, self._digests(ids, length)

    def _unshared(self, length: int) -> tuple[int, ...]:
        """Return ids that no other prompt has, counted down from the top where no trace has its ids."""
        count = -(-length // HASH_BLOCK_TOKENS)
        self._num_unshared += count
        first = VOCAB_SIZE - self._num_unshared
        return tuple(range(first, first + count))

    def _digests(self, ids: tuple[int, ...], length: int) -> tuple[bytes, ...]:
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        known, parent = self._known, self._root
        digests: list[bytes] = []
        per_id = HASH_BLOCK_TOKENS // self._size
        for block_id in ids[: length // HASH_BLOCK_TOKENS]:
            found = known.get((parent, block_id))
            if found is None:
                found = known[parent, block_id] = self._chain(parent, block_id, per_id)
            digests += found
            parent = found[-1]
        left = length % HASH_BLOCK_TOKENS // self._size
        if left:  # a context's next turn most likely fills this block
            found = known.get((parent, ids[-1]))
            if found is None:
                found = known[parent, ids[-1]] = self._chain(parent, ids[-1], per_id)
            digests += found[:left]
        return tuple(digests)

    def _chain(self, parent: bytes, block_id: int, count: int) -> tuple[bytes, ...]:
        tokens = array("I", _tokens_of(block_id) * self._size)
        digests = []
        for _ in range(count):
            parent = prefix_hash.block_digest(parent, tokens)
            digests.append(parent)
        return tuple(digests)


def _tokens_of(block_id: int) -> bytes:
    """Return one token of a block, as an array of typecode I holds it. [4 bytes]"""
    return (block_id % VOCAB_SIZE).to_bytes(4, sys.byteorder)
