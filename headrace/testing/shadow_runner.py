"""A Runner whose tokens depend on every KV row a sequence can see, so that a wrong block shows.

It keeps a 64-bit number per slot in place of keys and values. A token read through the wrong block, at
the wrong place, computed twice or not at all changes what is drawn; a right engine draws the same
whatever it cached, chunked, preempted or batched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.simulated.runner import SimulatedRunner
from headrace.backends.simulated.tokens import mix
from headrace.types import ForwardBatch

_UNWRITTEN = 0xDEADBEEF


class ShadowRunner(SimulatedRunner):
    """A SimulatedRunner that pretends to attend."""

    rows: NDArray[np.uint64]
    num_tokens = 0
    """Tokens computed so far, those computed again included."""
    most_tokens = 0
    """Tokens of the largest step."""

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.can_repeat = False  # what is drawn depends on the rows written before
        self.rows = np.full(num_blocks * self.block_size, _UNWRITTEN, np.uint64)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        blocks = self.rows.reshape(-1, self.block_size)
        for source, target in pairs:
            blocks[target] = blocks[source]

    def contexts(self, batch: ForwardBatch) -> NDArray[np.uint64]:
        self.num_tokens += len(batch.token_ids)
        self.most_tokens = max(self.most_tokens, len(batch.token_ids))
        positions = batch.positions.astype(np.uint64)
        self.rows[batch.slots[0]] = mix(mix(batch.token_ids.astype(np.uint64)) + positions)
        contexts = np.zeros(len(batch.sample_rows), np.uint64)
        for index in range(len(batch.query_starts) - 1):
            first, last = batch.sample_starts[index : index + 2]
            end = int(batch.query_starts[index + 1])
            seen = self._visible(batch, index)
            for row in range(first, last):
                hidden = end - 1 - int(batch.sample_rows[row])
                visible = seen[: len(seen) - hidden]
                contexts[row] = mix(visible.sum(dtype=np.uint64, keepdims=True))[0]
        return contexts ^ _histories(batch)

    def _visible(self, batch: ForwardBatch, index: int) -> NDArray[np.uint64]:
        """Return what the sequence's rows hold, each tied to its place. [kv_len]"""
        places = np.arange(int(batch.kv_lens[0, index]))
        blocks = batch.block_tables[0, index, places // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + places % self.block_size
        return mix(self.rows[slots] ^ places.astype(np.uint64))


def _histories(batch: ForwardBatch) -> NDArray[np.uint64]:
    """Return a number per sample row that depends on its penalties' history, in no order. [R]"""
    sampling = batch.sampling
    ids = sampling.history_ids.astype(np.uint64)
    counts = sampling.history_counts.astype(np.uint64)
    mixed = mix(mix(ids) + counts)
    starts = sampling.history_starts
    return np.array(
        [
            mixed[starts[row] : starts[row + 1]].sum(dtype=np.uint64)
            for row in range(len(starts) - 1)
        ],
        np.uint64,
    )
