"""Paged attention for decodes and prefill chunks in one batch, online softmax in f32.

An item is (sequence, tile of its queries, kv head). Its rows are visited 16 at a time, aligned at row
0 of the sequence, expanded to f32 once for all queries of the tile. What one query adds up, and in which order,
depends on its own visible rows alone: results are the same bit for bit whatever the chunking of the
prompt, the batch, the block size, the block ids and the number of threads.

Keys and values [num_blocks, block_size, num_kv_heads, head_dim] in f32, bf16 or f16; an optional bias plane
[num_blocks, block_size, num_kv_heads] f32, -inf hides a row from a head. Only table entries of the
rows below kv_len are read. head_dim is a multiple of 16.

Work is split by cost, (visible rows) x (queries), into one contiguous run of items per worker; each
worker finds its run itself, so that nothing is planned per layer.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_rows import (
    address_of,
    exp32,
    floats,
    ints,
    load_row,
    row_size,
    store_row,
    tanh32,
)
from headrace.backends.cpu.kernels_vector import dot16, scale_and_add16

ROWS = 16
TILE_ROWS = 48
"""Query vectors (queries x heads of one kv head) that share an expansion of keys and values."""

_HIDDEN = np.float32(-np.inf)


@kernel()
def _expand_rows(plane, row_format, table, head, shape, first, count, out):  # type: ignore[no-untyped-def]
    """out[16, head_dim] = rows first .. first + count of one head; the rest zeros."""
    block_size, num_heads, head_dim = shape
    size = row_size(row_format)
    for i in range(ROWS):
        target = out[i * head_dim : (i + 1) * head_dim]
        if i >= count:
            target[:] = np.float32(0.0)
            continue
        row = first + i
        slot = np.int64(table[row // block_size]) * block_size + row % block_size
        load_row(plane + (slot * num_heads + head) * head_dim * size, row_format, head_dim, target)


@kernel()
def _bias_rows(plane, table, head, shape, first, count, out):  # type: ignore[no-untyped-def]
    """out[16] = the bias of rows first .. first + count for one head."""
    block_size, num_heads, _ = shape
    for i in range(count):
        row = first + i
        slot = np.int64(table[row // block_size]) * block_size + row % block_size
        out[i] = floats(plane + (slot * num_heads + head) * 4, 1)[0]


@kernel()
def _softmax_step(scores, bias, has_bias, first, last, scale, softcap, largest):  # type: ignore[no-untyped-def]
    """Turn 16 raw scores into weights for rows first .. last; return (largest so far, their sum)."""
    for j in range(ROWS):
        score = scores[j] * scale
        if softcap > np.float32(0.0):
            score = softcap * tanh32(score / softcap)
        if has_bias:
            score = score + bias[j]
        scores[j] = score if first <= j < last else _HIDDEN
    best = largest
    for j in range(ROWS):
        best = max(best, scores[j])
    total = np.float32(0.0)
    if best == _HIDDEN:
        return best, total
    for j in range(ROWS):
        scores[j] = exp32(scores[j] - best)
    for j in range(ROWS):
        total += scores[j]
    return best, total


@kernel()
def _attend_item(  # type: ignore[no-untyped-def]
    q, q_format, q_stride, out, out_format, out_stride, key_plane, value_plane, kv_format, bias_plane,
    table, shape, ratio, head, kv_len, first_row, num_queries, scale, softcap, window, scratch,
):  # fmt: skip
    """`num_queries` queries; the first sits on row `first_row` of the sequence and sees up to it."""
    head_dim = shape[2]
    num_rows = num_queries * ratio
    keys, values = scratch[: ROWS * head_dim], scratch[ROWS * head_dim : 2 * ROWS * head_dim]
    rest = scratch[2 * ROWS * head_dim :]
    scores, bias = rest[:ROWS], rest[ROWS : 2 * ROWS]
    rest = rest[2 * ROWS :]
    largest, sums = rest[:num_rows], rest[num_rows : 2 * num_rows]
    queries = rest[2 * num_rows :][: num_rows * head_dim]
    totals = rest[2 * num_rows + num_rows * head_dim :][: num_rows * head_dim]
    q_bytes, out_bytes = row_size(q_format), row_size(out_format)
    for m in range(num_rows):
        column = (head * ratio + m % ratio) * head_dim
        source = q + (m // ratio) * q_stride + column * q_bytes
        load_row(source, q_format, head_dim, queries[m * head_dim : (m + 1) * head_dim])
        largest[m] = _HIDDEN
        sums[m] = np.float32(0.0)
    totals[:] = np.float32(0.0)
    bias[:] = np.float32(0.0)
    start = 0 if window <= 0 else max(0, first_row - window + 1)
    stop = min(kv_len, first_row + num_queries)
    for base in range(start // ROWS * ROWS, stop, ROWS):
        count = min(ROWS, kv_len - base)
        _expand_rows(key_plane, kv_format, table, head, shape, base, count, keys)
        _expand_rows(value_plane, kv_format, table, head, shape, base, count, values)
        if bias_plane != 0:
            _bias_rows(bias_plane, table, head, shape, base, count, bias)
        for m in range(num_rows):
            last_seen = first_row + m // ratio
            first = 0 if window <= 0 else max(0, last_seen - window + 1 - base)
            last = min(ROWS, last_seen + 1 - base)
            if first >= last:
                continue
            query = address_of(queries[m * head_dim :])
            dot16(query, address_of(keys), head_dim * 4, head_dim, address_of(scores))
            best, total = _softmax_step(
                scores, bias, bias_plane != 0, first, last, scale, softcap, largest[m]
            )
            if best == _HIDDEN:
                continue
            fade = exp32(largest[m] - best)
            largest[m] = best
            sums[m] = sums[m] * fade + total
            scale_and_add16(
                address_of(totals[m * head_dim :]), fade, address_of(scores),
                address_of(values), head_dim * 4, head_dim,
            )  # fmt: skip
    for m in range(num_rows):
        row = totals[m * head_dim : (m + 1) * head_dim]
        divisor = sums[m] if sums[m] > np.float32(0.0) else np.float32(1.0)
        for i in range(head_dim):
            row[i] /= divisor
        column = (head * ratio + m % ratio) * head_dim
        target = out + (m // ratio) * out_stride + column * out_bytes
        store_row(row, target, out_format, head_dim)


@kernel()
def _cost(first_row, num_queries, window):  # type: ignore[no-untyped-def]
    rows = first_row + num_queries
    if window > 0:
        rows = min(rows, window + num_queries)
    return (rows // ROWS + 2) * (num_queries + 1)


@kernel()
def attend_share(  # type: ignore[no-untyped-def]
    worker, num_workers, q, q_format, q_stride, out, out_format, out_stride,
    key_plane, value_plane, kv_format, bias_plane, query_starts_at, kv_lens_at, tables_at,
    num_sequences, table_width, block_size, num_kv_heads, head_dim, ratio, scale, softcap, window,
):  # fmt: skip
    """Compute one worker's share of a layer. Addresses are of [T, heads * head_dim] q and out."""
    query_starts = ints(query_starts_at, num_sequences + 1)
    kv_lens = ints(kv_lens_at, num_sequences)
    tables = ints(tables_at, num_sequences * table_width)
    tile = max(1, TILE_ROWS // ratio)
    shape = (block_size, num_kv_heads, head_dim)
    scratch = np.empty(
        2 * ROWS * head_dim + 2 * ROWS + tile * ratio * (2 * head_dim + 2), np.float32
    )
    total = 0
    for s in range(num_sequences):
        num_queries = query_starts[s + 1] - query_starts[s]
        for first in range(0, num_queries, tile):
            row = kv_lens[s] - num_queries + first
            total += num_kv_heads * _cost(row, min(tile, num_queries - first), window)
    begin, end = total * worker // num_workers, total * (worker + 1) // num_workers
    done = 0
    for s in range(num_sequences):
        num_queries = query_starts[s + 1] - query_starts[s]
        for first in range(0, num_queries, tile):
            row = kv_lens[s] - num_queries + first
            num_tile = min(tile, num_queries - first)
            cost = _cost(row, num_tile, window)
            token = query_starts[s] + first
            for head in range(num_kv_heads):
                if begin <= done < end:
                    _attend_item(
                        q + token * q_stride, q_format, q_stride,
                        out + token * out_stride, out_format, out_stride,
                        key_plane, value_plane, kv_format, bias_plane,
                        tables[s * table_width : (s + 1) * table_width], shape, ratio, head,
                        kv_lens[s], row, num_tile, np.float32(scale), np.float32(softcap), window,
                        scratch,
                    )  # fmt: skip
                done += cost


@kernel(parallel=True)
def attend_parallel(  # type: ignore[no-untyped-def]
    num_workers, q, q_format, q_stride, out, out_format, out_stride,
    key_plane, value_plane, kv_format, bias_plane, query_starts_at, kv_lens_at, tables_at,
    num_sequences, table_width, block_size, num_kv_heads, head_dim, ratio, scale, softcap, window,
):  # fmt: skip
    for worker in prange(num_workers):
        attend_share(
            worker, num_workers, q, q_format, q_stride, out, out_format, out_stride,
            key_plane, value_plane, kv_format, bias_plane, query_starts_at, kv_lens_at, tables_at,
            num_sequences, table_width, block_size, num_kv_heads, head_dim, ratio, scale, softcap,
            window,
        )  # fmt: skip
