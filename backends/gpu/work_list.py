"""Splits a step's attention into pieces of about equal size, once per step, on the host.

A piece is a tile of consecutive query tokens of one sequence against a run of its KV rows. Each KV head of
a piece is one thread block. Long runs are split so that the number of blocks is a few per
multiprocessor whatever the batch; every query token's partial results are then merged.
The planning follows FlashInfer's load-balanced work list (arXiv 2501.01005), built from scratch.

PIECES columns: sequence, first token, number of tokens, rows the last token sees (its kv_len), first row,
row after the last, partial's index, 0. MERGES columns: token, first partial, number of partials (0: the
token sees nothing), its place in the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_COLUMNS = 8
MERGE_COLUMNS = 4
MIN_ROWS = 64
"""A piece is not shorter than this unless its tile is: below it the merge costs more than it spreads."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """Plain arrays; `capacity` is what a graph captured for this bucket launches."""

    pieces: NDArray[np.int32]  # [capacity, 8], used ones first
    merges: NDArray[np.int32]  # [max_tokens, 4], used ones first
    counts: NDArray[np.int32]  # [2]: pieces used, merges used
    tile_tokens: int


def plan_attention(
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    chosen: NDArray[np.bool_],
    *,
    window: int | None,
    tile_tokens: int,
    blocks_wanted: int,
    max_tokens: int,
) -> WorkList:
    """Plan the sequences that `chosen` [S] marks.

    query_starts [S + 1]; kv_lens [S]: rows that a sequence's last query sees. `blocks_wanted`: pieces
    to aim at. `max_tokens`: query tokens that the arrays have room for; raises ValueError beyond it.
    """
    tiles = _tiles(query_starts, kv_lens, chosen, window, tile_tokens)
    num_tokens = int(tiles[:, 2].sum())
    if num_tokens > max_tokens:
        raise ValueError(
            f"{num_tokens} query tokens are planned, the work list has room for {max_tokens}"
        )
    rows = tiles[:, 5] - tiles[:, 4]
    # at most one piece per tile more than blocks_wanted, so the capacity depends on the bucket alone
    piece_rows = max(MIN_ROWS, -(-int(rows.sum()) // blocks_wanted))
    splits = np.maximum(1, -(-rows // piece_rows))
    firsts = np.cumsum(splits) - splits
    index = np.repeat(np.arange(len(tiles)), splits)
    part = np.arange(len(index)) - firsts[index]
    pieces = np.zeros((max_tokens + blocks_wanted, PIECE_COLUMNS), np.int32)
    used = pieces[: len(index)]
    used[:, :4] = tiles[index, :4]
    used[:, 4] = tiles[index, 4] + rows[index] * part // splits[index]
    used[:, 5] = tiles[index, 4] + rows[index] * (part + 1) // splits[index]
    used[:, 6] = np.arange(len(index))
    merges = np.zeros((max_tokens, MERGE_COLUMNS), np.int32)
    tile_of = np.repeat(np.arange(len(tiles)), tiles[:, 2])
    starts = np.cumsum(tiles[:, 2]) - tiles[:, 2]
    place = np.arange(num_tokens) - starts[tile_of]
    merges[:num_tokens, 0] = tiles[tile_of, 1] + place
    merges[:num_tokens, 1] = firsts[tile_of]
    merges[:num_tokens, 2] = splits[tile_of]
    merges[:num_tokens, 3] = place
    return WorkList(pieces, merges, np.array([len(index), num_tokens], np.int32), tile_tokens)


def _tiles(
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    chosen: NDArray[np.bool_],
    window: int | None,
    tile_tokens: int,
) -> NDArray[np.int64]:
    """Return [tiles, 6]: the first six columns of a piece that covers all its rows."""
    tiles = []
    for sequence in np.flatnonzero(chosen):
        start, stop = int(query_starts[sequence]), int(query_starts[sequence + 1])
        before = int(kv_lens[sequence]) - (stop - start)  # rows older than this step's tokens
        for first in range(start, stop, tile_tokens):
            count = min(tile_tokens, stop - first)
            seen = before + first - start + count
            oldest = 0 if window is None else max(0, seen - count + 1 - window)
            tiles.append((sequence, first, count, seen, oldest, max(seen, oldest)))
    return np.array(tiles, np.int64).reshape(-1, 6)
