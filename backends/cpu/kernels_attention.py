"""Paged attention for decodes and prefill chunks in one batch, online softmax in f32.

An item is (sequence, tile of its queries, kv head). Its rows are visited 16 at a time, aligned at row
0 of the sequence, expanded to f32 once for all queries of the tile. What one query adds up, and in which order,
depends on its own visible rows alone: results are the same bit for bit whatever the chunking of the
prompt, the batch, the block size, the block ids and the number of threads.

Keys and values [num_blocks, block_size, num_kv_heads, head_dim] in f32, bf16 or f16; an optional bias plane
[num_blocks, block_size, num_kv_heads] f32, -inf hides a row from a head. Only table entries of the
rows below kv_len are read. head_dim is a multiple of 16.

Versions tried, 16 decodes at context 200 (9 heads, 3 kv heads, size 64, bf16), Zen 5, relative time: dot
products as vectors but softmax in plain loops, expansion row by row 1; one vector routine per
query and 16 rows, slots found once per 16 rows, the next 16 asked for ahead 0.34 (prefill of 1,000: 0.43).

Work is split by cost, (visible rows) x (queries), into one contiguous run of items per worker; each
worker finds its run itself, so that nothing is planned per layer.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_rows import (
    BF16,
    address_of,
    floats,
    ints,
    load_row,
    row_size,
    store_row,
)
from headrace.backends.cpu.kernels_vector import attend16, prefetch, widen_bf16

ROWS = 16
TILE_ROWS = 48
"""Query vectors (queries x heads of one kv head) that share an expansion of keys and values."""

_HIDDEN = np.float32(-np.inf)


@kernel()
def _find_rows(table, block_size, first, count, slots):  # type: ignore[no-untyped-def]
    """slots[i] = the slot of row first + i."""
    block, offset = first // block_size, first % block_size
    slot = np.int64(table[block]) * block_size + offset
    for i in range(count):
        if offset == block_size:
            block, offset = block + 1, 0
            slot = np.int64(table[block]) * block_size
        slots[i] = slot
        slot += 1
        offset += 1


@kernel()
def _expand(plane, row_format, slots, head, num_heads, head_dim, count, out):  # type: ignore[no-untyped-def]
    """out[16, head_dim] = one head of `count` slots; the rest zeros."""
    row_bytes = head_dim * row_size(row_format)
    for i in range(count):
        address = plane + (slots[i] * num_heads + head) * row_bytes
        if row_format == BF16:
            widen_bf16(address, address_of(out) + i * head_dim * 4, head_dim)
        else:
            load_row(address, row_format, head_dim, out[i * head_dim : (i + 1) * head_dim])
    if count < ROWS:
        out[count * head_dim :] = np.float32(0.0)


@kernel()
def _prefetch_rows(plane, row_format, slots, head, num_heads, head_dim, count):  # type: ignore[no-untyped-def]
    row_bytes = head_dim * row_size(row_format)
    for i in range(count):
        address = plane + (slots[i] * num_heads + head) * row_bytes
        for offset in range(0, row_bytes, 64):
            prefetch(address + offset)


@kernel()
def _attend_item(  # type: ignore[no-untyped-def]
    q, q_format, q_stride, out, out_format, out_stride, key_plane, value_plane, kv_format, bias_plane,
    table, shape, ratio, head, kv_len, first_row, num_queries, scale, softcap, window, scratch, slots,
):  # fmt: skip
    """`num_queries` queries; the first sits on row `first_row` of the sequence and sees up to it."""
    block_size, num_heads, head_dim = shape
    num_rows = num_queries * ratio
    keys, values = scratch[: ROWS * head_dim], scratch[ROWS * head_dim : 2 * ROWS * head_dim]
    rest = scratch[2 * ROWS * head_dim :]
    bias, states = rest[:ROWS], rest[ROWS : ROWS + 2 * num_rows]
    rest = rest[ROWS + 2 * num_rows :]
    queries, totals = (
        rest[: num_rows * head_dim],
        rest[num_rows * head_dim :][: num_rows * head_dim],
    )
    q_bytes, out_bytes, row_bytes = row_size(q_format), row_size(out_format), head_dim * 4
    for m in range(num_rows):
        column = (head * ratio + m % ratio) * head_dim
        source = q + (m // ratio) * q_stride + column * q_bytes
        load_row(source, q_format, head_dim, queries[m * head_dim : (m + 1) * head_dim])
        states[2 * m] = _HIDDEN
        states[2 * m + 1] = np.float32(0.0)
    totals[:] = np.float32(0.0)
    bias[:] = np.float32(0.0)
    bias_at = address_of(bias) if bias_plane != 0 else np.int64(0)
    start = 0 if window <= 0 else max(0, first_row - window + 1)
    stop = min(kv_len, first_row + num_queries)
    here, following = slots[:ROWS], slots[ROWS:]
    _find_rows(table, block_size, start // ROWS * ROWS, min(ROWS, kv_len), here)
    for base in range(start // ROWS * ROWS, stop, ROWS):
        count = min(ROWS, kv_len - base)
        if base + ROWS < stop:
            ahead = min(ROWS, kv_len - base - ROWS)
            _find_rows(table, block_size, base + ROWS, ahead, following)
            _prefetch_rows(key_plane, kv_format, following, head, num_heads, head_dim, ahead)
            _prefetch_rows(value_plane, kv_format, following, head, num_heads, head_dim, ahead)
        _expand(key_plane, kv_format, here, head, num_heads, head_dim, count, keys)
        _expand(value_plane, kv_format, here, head, num_heads, head_dim, count, values)
        if bias_plane != 0:
            for i in range(count):
                bias[i] = floats(bias_plane + (here[i] * num_heads + head) * 4, 1)[0]
        for m in range(num_rows):
            last_seen = first_row + m // ratio
            first = 0 if window <= 0 else max(0, last_seen - window + 1 - base)
            last = min(ROWS, last_seen + 1 - base)
            if first < last:
                attend16(
                    address_of(queries) + m * row_bytes, address_of(keys), address_of(values),
                    address_of(totals) + m * row_bytes, address_of(states) + m * 8, bias_at,
                    first, last, scale, softcap, head_dim,
                )  # fmt: skip
        here, following = following, here
    for m in range(num_rows):
        row = totals[m * head_dim : (m + 1) * head_dim]
        divisor = states[2 * m + 1] if states[2 * m + 1] > np.float32(0.0) else np.float32(1.0)
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
    tile_floats = tile * ratio * (2 * head_dim + 2)
    scratch = np.empty(2 * ROWS * head_dim + ROWS + tile_floats, np.float32)
    slots = np.empty(2 * ROWS, np.int64)
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
                        scratch, slots,
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
            np.int64(worker), num_workers, q, q_format, q_stride, out, out_format, out_stride,
            key_plane, value_plane, kv_format, bias_plane, query_starts_at, kv_lens_at, tables_at,
            num_sequences, table_width, block_size, num_kv_heads, head_dim, ratio, scale, softcap,
            window,
        )  # fmt: skip
