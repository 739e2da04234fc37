"""The arrays that say what one step computes, and what came of it.

Letters: T tokens of this step, S sequences, R sample rows, G KV groups, B blocks of the longest table.
All arrays are NumPy, C-contiguous, on the host. Complete in themselves: no engine object inside, so a
batch can be sent to other ranks, recorded and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from array import array

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One entry per sample row. Ragged lists are (starts, values) pairs."""

    temperature: NDArray[np.float32]  # [R], 0: greedy
    top_k: NDArray[np.int32]  # [R], 0: off
    top_p: NDArray[np.float32]  # [R], 1: off
    min_p: NDArray[np.float32]  # [R], 0: off
    presence_penalty: NDArray[np.float32]  # [R], 0: off
    frequency_penalty: NDArray[np.float32]  # [R], 0: off
    repetition_penalty: NDArray[np.float32]  # [R], 1: off
    seeds: NDArray[np.uint64]  # [R], the sequence's Philox key
    positions: NDArray[np.int64]  # [R], the position of the token to draw: the Philox counter
    num_logprobs: NDArray[np.int32]  # [R], -1: off; k >= 0: the chosen token's and the top k
    score_token_ids: NDArray[np.int32]  # [R], -1: draw; else a prompt token to score, nothing drawn
    history_starts: NDArray[np.int32]  # [R + 1]
    history_ids: NDArray[np.int32]  # distinct tokens of prompt and output, rows with penalties only
    history_counts: NDArray[np.int32]  # times each was in the output; 0: in the prompt only
    bias_starts: NDArray[np.int32]  # [R + 1]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]  # added to the logits; -inf forbids


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What to compute this step. A slot is block_id * block_size + offset."""

    token_ids: NDArray[np.int32]  # [T]
    token_sources: NDArray[np.int32]  # [T], sample row of the step before whose token goes here; -1
    positions: NDArray[np.int32]  # [T], rotary positions: may run ahead of rows
    query_starts: NDArray[np.int32]  # [S + 1]
    slots: NDArray[np.int64]  # [G, T], where each token's keys and values are written
    kv_lens: NDArray[np.int32]  # [G, S], rows visible to the sequence's last query of this step
    block_tables: NDArray[np.int32]  # [G, S, B], entries past the end are never read
    sample_rows: NDArray[np.int32]  # [R], index into T; a row may occur twice
    sample_starts: NDArray[np.int32]  # [S + 1], each sequence's sample rows
    draft_token_ids: NDArray[np.int32]  # [R], the draft that follows this row's token; -1: none
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What each sample row gave. K is the largest num_logprobs of the batch (0 possible)."""

    token_ids: NDArray[np.int32]  # [R], drawn; for a scoring row, the token scored
    logprobs: NDArray[np.float32] | None  # [R], of that token; None: no row asked
    top_token_ids: (
        NDArray[np.int32] | None
    )  # [R, K], best first, ties by lower id; -1 past a row's own k
    top_logprobs: NDArray[np.float32] | None  # [R, K]
    failed: NDArray[np.bool_]  # [R], the row's logits held NaN: its sequence cannot go on


@dataclass(slots=True)
class RunBatch:
    """What a step costs and whose tokens it draws: all that virtual time needs, for no row is stored."""

    num_prefill_tokens: int
    """Of chunks of more than one token: one alone costs what a decode costs."""
    num_sequences: int
    num_kv_rows: int
    """Rows of keys and values that attention reads."""
    seeds: list[int]  # [R], 0 for greedy rows
    positions: list[int]  # [R], of the token to draw


@dataclass(slots=True)
class RunResult:
    """What several steps in a row gave, each fed with the tokens of the one before."""

    token_ids: list[array[int]]  # [R] times [k] drawn, of typecode I
    times: list[float]  # [k], when each step's result was in, on the engine's clock


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens a grammar allows, packed 32 to a word; rows without a grammar are absent."""

    rows: NDArray[np.int32]  # [M], sample rows
    bits: NDArray[np.int32]  # [M, ceil(vocab / 32)]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A stored tensor [out, in] (or [n]): rows of plain numbers, or rows of a scheme's raw blocks."""

    name: str
    scheme: str
    """f32, f16, bf16 (data holds u2), or a block scheme such as q4_1, q8_0, q4_k, q6_k."""
    shape: tuple[int, ...]
    data: NDArray[Any]
    """Plain: the shape itself. Blocks: [out, bytes_per_row] u1. Usually a view of a mapped file."""
