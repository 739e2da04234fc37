"""What the sampling kernels take of a step: the batch's columns packed into a few arrays, one upload each.

FLOATS columns: temperature, top_p, min_p, presence, frequency, repetition. INTS columns: top_k,
num_logprobs, score_token_id (-1: draw), history start and end, bias start and end, row of the masks (-1).
Seeds and positions are arrays of their own: kernels read them from device memory, so that a captured
graph draws anew at every replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.types import SamplingBatch, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingArguments:
    """Arrays on the host, ready to be uploaded. R rows."""

    floats: NDArray[np.float32]  # [R, 6]
    ints: NDArray[np.int32]  # [R, 8]
    seeds: NDArray[np.uint64]  # [R]
    positions: NDArray[np.int64]  # [R]
    history_ids: NDArray[np.int32]
    history_counts: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    masks: NDArray[np.int32]  # [M, ceil(vocab / 32)]
    adjusts: bool
    """Whether some row has a mask, a bias or penalties."""
    filters_by_count: bool
    """Whether some row has a top_k."""
    filters_by_mass: bool
    """Whether some row has a top_p below 1."""
    most_logprobs: int
    """The largest num_logprobs; -1: no row asked."""


def pack_sampling(
    sampling: SamplingBatch, masks: TokenMasks | None, vocab_size: int
) -> SamplingArguments:
    """Pack one step's sampling parameters."""
    num_rows = len(sampling.temperature)
    mask_of = np.full(num_rows, -1, np.int32)
    bits = np.zeros((0, -(-vocab_size // 32)), np.int32)
    if masks is not None and len(masks.rows):
        mask_of[masks.rows] = np.arange(len(masks.rows))
        bits = masks.bits
    draws = (sampling.score_token_ids < 0) & (sampling.temperature > 0)
    floats = (
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty,
        sampling.frequency_penalty, sampling.repetition_penalty,
    )  # fmt: skip
    ints = (
        np.where((sampling.top_k > 0) & (sampling.top_k < vocab_size), sampling.top_k, 0),
        np.minimum(sampling.num_logprobs, vocab_size), sampling.score_token_ids,
        sampling.history_starts[:-1], sampling.history_starts[1:],
        sampling.bias_starts[:-1], sampling.bias_starts[1:], mask_of,
    )  # fmt: skip
    packed_ints = np.stack(ints, axis=1).astype(np.int32)
    return SamplingArguments(
        floats=np.stack(floats, axis=1).astype(np.float32),
        ints=packed_ints,
        seeds=_plain(sampling.seeds, np.uint64),
        positions=_plain(sampling.positions, np.int64),
        history_ids=_plain(sampling.history_ids, np.int32),
        history_counts=_plain(sampling.history_counts, np.int32),
        bias_ids=_plain(sampling.bias_ids, np.int32),
        bias_values=_plain(sampling.bias_values, np.float32),
        masks=_plain(bits, np.int32),
        adjusts=bool(
            len(bits)
            or sampling.history_starts[-1] > sampling.history_starts[0]
            or sampling.bias_starts[-1] > sampling.bias_starts[0]
        ),
        filters_by_count=bool((draws & (packed_ints[:, 0] > 0)).any()),
        filters_by_mass=bool((draws & (sampling.top_p < 1)).any()),
        most_logprobs=int(sampling.num_logprobs.max(initial=-1)),
    )


def blocks_per_row(num_rows: int, vocab_size: int, num_multiprocessors: int) -> int:
    """Return how many thread blocks share a row: two per multiprocessor in all, 2,048 logits each at least."""
    wanted = -(-2 * num_multiprocessors // max(1, num_rows))
    return max(1, min(wanted, -(-vocab_size // 2048), 32))


def _plain(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype)
