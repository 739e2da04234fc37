"""Draws a step's tokens with the sampling kernel: torch and Numba's own pool, whose threads spin, stay asleep.

Large draws are shared with threads that sleep in between: a hand-over costs 0.1 ms, a row up to 0.2 ms.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.kernels_sampling import sample_share
from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


SHARED_LOGITS = 1 << 20
"""From this many logits on, other threads draw too."""


class FastSampler:
    """Mutable: `drawn` is what the last step gave. `close` ends its threads."""

    def __init__(self, num_threads: int) -> None:
        self.drawn: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_threads = num_threads
        self._scratch = np.empty((num_threads, 0), np.float32)
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "headrace-draw")

    def close(self) -> None:
        self._helpers.shutdown()

    def sample(
        self,
        logits: tuple[int, int, int],
        sampling: SamplingBatch,
        masks: TokenMasks | None,
        num_threads: int,
    ) -> StepResult:
        """`logits`: address, bytes from row to row, and vocabulary size."""
        where, stride, vocab_size = logits
        num_rows = len(sampling.temperature)
        if self._scratch.shape[1] < 2 * vocab_size:
            self._scratch = np.empty((self._num_threads, 2 * vocab_size), np.float32)
        most = int(sampling.num_logprobs.max(initial=-1))
        token_ids = np.zeros(num_rows, np.int32)
        failed = np.zeros(num_rows, np.bool_)
        logprobs = np.zeros(num_rows, np.float32)
        top_token_ids = np.full((num_rows, max(0, most)), -1, np.int32)
        top_logprobs = np.zeros((num_rows, max(0, most)), np.float32)
        mask_of, bits = _masks(masks, num_rows)
        arguments = (
            where, stride, vocab_size, self._scratch, _floats(sampling), _ints(sampling),
            _plain(sampling.positions, np.int64), _plain(sampling.seeds, np.uint64),
            _plain(sampling.history_ids, np.int32), _plain(sampling.history_counts, np.int32),
            _plain(sampling.bias_ids, np.int32), _plain(sampling.bias_values, np.float32),
            mask_of, bits, token_ids, failed, logprobs, top_token_ids, top_logprobs,
        )  # fmt: skip
        shares = min(num_threads, num_rows) if num_rows * vocab_size >= SHARED_LOGITS else 1
        others = [
            self._helpers.submit(sample_share, share, shares, *arguments)
            for share in range(1, shares)
        ]
        sample_share(0, max(1, shares), *arguments)
        for other in others:
            other.result()
        self.drawn = token_ids
        if most < 0:
            return StepResult(token_ids, None, None, None, failed)
        return StepResult(token_ids, logprobs, top_token_ids, top_logprobs, failed)


def _floats(sampling: SamplingBatch) -> NDArray[np.float32]:
    columns = (
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty,
        sampling.frequency_penalty, sampling.repetition_penalty,
    )  # fmt: skip
    return np.stack(columns, axis=1).astype(np.float32, copy=False)


def _ints(sampling: SamplingBatch) -> NDArray[np.int32]:
    columns = (
        sampling.top_k, sampling.num_logprobs, sampling.score_token_ids,
        sampling.history_starts[:-1], sampling.history_starts[1:],
        sampling.bias_starts[:-1], sampling.bias_starts[1:],
    )  # fmt: skip
    return np.stack(columns, axis=1).astype(np.int32, copy=False)


def _masks(masks: TokenMasks | None, num_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return which mask each row has (-1: none) and the masks, one at least."""
    mask_of = np.full(num_rows, -1, np.int32)
    if masks is None or len(masks.rows) == 0:
        return mask_of, np.zeros((1, 1), np.int32)
    mask_of[masks.rows] = np.arange(len(masks.rows))
    return mask_of, _plain(masks.bits, np.int32)


def _plain(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Contiguous and writable: other kinds of arrays would each compile the kernel again."""
    plain = np.ascontiguousarray(array, dtype)
    return plain if plain.flags.writeable else plain.copy()
