"""Real steps of varied shapes, so that every kernel is compiled before the first request.

A start must not be slow: 64 rows reach the same kernels as a full step, at a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.types import EngineSettings, ForwardBatch, SamplingBatch, TokenMasks

MAX_ROWS = 64
ROW_COUNTS = (1, 2, 4, 8, 16, MAX_ROWS)
SEED = 0x9E3779B97F4A7C15


def warm_up_steps(
    settings: EngineSettings, *, num_groups: int, num_blocks: int, vocab_size: int
) -> Sequence[tuple[ForwardBatch, TokenMasks | None]]:
    """Return the steps to run, in order: each may take tokens that the one before drew.

    They write into blocks of the empty pool, one block per sequence, and read only what they wrote.
    """
    steps = _Steps(settings, num_groups, num_blocks, vocab_size)
    return list(steps.all())


class _Steps:
    def __init__(
        self, settings: EngineSettings, num_groups: int, num_blocks: int, vocab_size: int
    ) -> None:
        self._block_size = settings.block_size
        self._num_groups = num_groups
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._max_tokens = min(MAX_ROWS, settings.max_batched_tokens)
        self._max_sequences = min(MAX_ROWS, settings.max_num_sequences, num_blocks)

    def all(self) -> Iterator[tuple[ForwardBatch, TokenMasks | None]]:
        yield self._batch([self._chunk(0, sample_offsets=())]), None
        for num_rows in ROW_COUNTS:
            if num_rows <= min(self._max_sequences, self._max_tokens):
                yield self._decode(num_rows, 0, sampling_batch(num_rows)), None
        num_rows = min(4, self._max_sequences, self._max_tokens)
        every_feature = self._every_feature(num_rows)
        yield self._decode(num_rows, 1, every_feature), self._mask()
        yield self._mixed(num_rows), None

    def _decode(self, num_rows: int, position: int, sampling: SamplingBatch) -> ForwardBatch:
        """A token each; from the second on it is the one that row 0 of the step before drew."""
        position = min(position, self._block_size - 1)
        sequences = [SequenceStep([0], position, [block]) for block in range(num_rows)]
        sources = [0 if position else -1] * num_rows
        return self._batch(sequences, sampling, sources)

    def _mixed(self, num_rows: int) -> ForwardBatch:
        """Decodes beside a chunk of a prompt."""
        position = min(2, self._block_size - 1)
        decodes = [SequenceStep([0], position, [block]) for block in range(num_rows - 1)]
        chunk = self._chunk(len(decodes))
        return self._batch([*decodes, chunk], sampling_batch(len(decodes) + 1))

    def _chunk(self, num_decodes: int, sample_offsets: Sequence[int] | None = None) -> SequenceStep:
        """The first tokens of a prompt, as many as fit beside the decodes."""
        blocks = list(range(num_decodes, self._num_blocks))
        num_tokens = min(self._max_tokens - num_decodes, len(blocks) * self._block_size)
        needed = -(-num_tokens // self._block_size)
        tokens = np.arange(num_tokens) % self._vocab_size
        return SequenceStep(tokens.tolist(), 0, blocks[:needed], sample_offsets)

    def _every_feature(self, num_rows: int) -> SamplingBatch:
        """Rows that draw with every filter, penalty, bias and log probability; the last one scores."""
        score = np.full(num_rows, -1)
        if num_rows > 1:
            score[-1] = 0
        columns = {
            "temperature": np.full(num_rows, 0.7),
            "top_k": np.full(num_rows, 8),
            "top_p": np.full(num_rows, 0.9),
            "min_p": np.full(num_rows, 0.01),
            "presence_penalty": np.full(num_rows, 0.1),
            "frequency_penalty": np.full(num_rows, 0.1),
            "repetition_penalty": np.full(num_rows, 1.1),
            "seeds": np.full(num_rows, SEED, np.uint64),
            "positions": np.full(num_rows, 2),
            "num_logprobs": np.full(num_rows, min(5, self._vocab_size)),
            "score_token_ids": score,
        }
        return sampling_batch(
            num_rows, columns, histories=[{0: 1}] * num_rows, biases=[{0: 1.0}] * num_rows
        )

    def _mask(self) -> TokenMasks:
        """Row 0 may draw any token."""
        words = -(-self._vocab_size // 32)
        return TokenMasks(np.zeros(1, np.int32), np.full((1, words), -1, np.int32))

    def _batch(
        self,
        sequences: Sequence[SequenceStep],
        sampling: SamplingBatch | None = None,
        token_sources: Sequence[int] | None = None,
    ) -> ForwardBatch:
        return forward_batch(
            sequences,
            block_size=self._block_size,
            num_groups=self._num_groups,
            sampling=sampling,
            token_sources=token_sources,
        )
