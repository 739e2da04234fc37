"""What the sampling kernel takes of a step, and what it gives: the same for both paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Draw:
    """One step's draw: `arguments` go to kernels_sampling.sample_share, `result` reads what it wrote."""

    def __init__(
        self,
        logits: tuple[int, int, int],
        scratch: NDArray[np.float32],
        sampling: SamplingBatch,
        masks: TokenMasks | None,
    ) -> None:
        """`logits`: address, bytes from row to row, vocabulary size. `scratch`: [threads, 2 * vocabulary]."""
        num_rows = len(sampling.temperature)
        self._most = int(sampling.num_logprobs.max(initial=-1))
        self.token_ids = np.zeros(num_rows, np.int32)
        self.failed = np.zeros(num_rows, np.bool_)
        self._logprobs = np.zeros(num_rows, np.float32)
        self._top_token_ids = np.full((num_rows, max(0, self._most)), -1, np.int32)
        self._top_logprobs = np.zeros((num_rows, max(0, self._most)), np.float32)
        self.arguments: tuple[Any, ...] = (
            *logits, scratch, _floats(sampling), _ints(sampling),
            _plain(sampling.positions, np.int64), _plain(sampling.seeds, np.uint64),
            _plain(sampling.history_ids, np.int32), _plain(sampling.history_counts, np.int32),
            _plain(sampling.bias_ids, np.int32), _plain(sampling.bias_values, np.float32),
            *_masks(masks, num_rows),
            self.token_ids, self.failed, self._logprobs, self._top_token_ids, self._top_logprobs,
        )  # fmt: skip

    def native(self) -> NDArray[np.int64]:
        """Return `arguments` as sizes and addresses, for fast.kernels_draw; valid while this object lives."""
        (logits_at, stride, vocab), arrays = self.arguments[:3], self.arguments[3:]
        scratch, histories, biases, masks = (arrays[i] for i in (0, 5, 7, 10))
        sizes = (
            logits_at, stride, vocab, len(self.token_ids), len(histories), len(biases),
            self._top_token_ids.shape[1], *masks.shape, len(scratch),
        )  # fmt: skip
        return np.array([*sizes, *(array.ctypes.data for array in arrays)], np.int64)

    def result(self) -> StepResult:
        """Return what was drawn. Call after every share has run."""
        if self._most < 0:
            return StepResult(self.token_ids, None, None, None, self.failed)
        return StepResult(
            self.token_ids, self._logprobs, self._top_token_ids, self._top_logprobs, self.failed
        )


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
