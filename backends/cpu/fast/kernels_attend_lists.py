"""Where an item of attention reads: its blocks as a table of runs, asked for before they are read."""

from __future__ import annotations

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_attend_rows import (
    SEGMENT_BLOCKS,
    block_bytes,
    fetch_run,
    list_pages,
    repeat_last,
)
from headrace.backends.cpu.kernels_rows import address_of, ints, longs

LEAD_RUNS = SEGMENT_BLOCKS + 2
"""How many runs are asked for before they are read, in the order of memory: a segment's keys are read before
its values, so that SEGMENT_BLOCKS are the least."""
TABLE_RUNS = 6 * SEGMENT_BLOCKS
"""Entries of a table of runs: where each block's keys and its values are, one after the other, of a segment
and of the one after it. The last is there several times, for those who ask for more than there is."""
TABLE_BYTES = 8 * (TABLE_RUNS + 8)
block_size_of = fast_kernel(block_bytes)
"""What the pool reckons with, for kernels."""


@fast_kernel
def block_at(layer, head, page, part, shape):  # type: ignore[no-untyped-def]
    """Where the keys of a block of 16 rows are (see kv_pool); its values follow, `block_bytes` behind.

    layer: a row of the pool's table; shape: blocks of 16 rows in one of the engine's (a page), block_bytes.
    """
    per_page, block_bytes = shape
    first, span_bytes, shift = layer
    inside = (head << shift) + (page & ((1 << shift) - 1))
    return first + (page >> shift) * span_bytes + (inside * per_page + part) * 2 * block_bytes


@fast_kernel
def layer_of(op, parameters):  # type: ignore[no-untyped-def]
    """An operation's row of the pool's table: first byte, bytes from span to span, log2 of a span's blocks."""
    row = longs(parameters[at.LAYERS] + op[at.LAYER] * at.LAYER_FIELDS * 8, at.LAYER_FIELDS)
    return row[0], row[1], row[2]


@fast_kernel
def unit_of(op, items_at, unit):  # type: ignore[no-untyped-def]
    """What unit number `unit` is: an item and a KV head."""
    kv_heads = op[at.KV_COUNT]
    item = longs(items_at + unit // kv_heads * at.ITEM_FIELDS * 8, at.ITEM_FIELDS)
    return item, unit % kv_heads


@fast_kernel
def rows_of(op, parameters, item):  # type: ignore[no-untyped-def]
    """What an item is about: its sequence's table, first token, that token's row, first and end block seen."""
    group, window = op[at.GROUP_INDEX], op[at.FORM]
    num_sequences, width = parameters[at.NUM_SEQUENCES], parameters[at.TABLE_WIDTH]
    sequence, count = item[at.SEQUENCE], item[at.NUM_QUERIES]
    starts = ints(parameters[at.QUERY_STARTS], num_sequences + 1)
    kv_lens = ints(parameters[at.KV_LENS] + group * num_sequences * 4, num_sequences)
    table_at = parameters[at.TABLES] + (group * num_sequences + sequence) * width * 4
    token = np.int64(starts[sequence]) + item[at.FIRST_QUERY]
    row = np.int64(kv_lens[sequence]) - np.int64(starts[sequence + 1]) + token
    start = max(0, row + 1 - window) if window > 0 else 0
    return table_at, token, row, start // LANES, (row + count + LANES - 1) // LANES


@fast_kernel
def list_runs(op, parameters, walked, whole, runs, used):  # type: ignore[no-untyped-def]
    """Write the runs of segment `whole` that are seen, behind `used`; return its first block and their number.

    walked: table, KV head, first and end block. Entries behind the last run name it again.
    """
    table_at, kv_head, first_block, end_block = walked
    per_page = parameters[at.BLOCK_SIZE] // LANES
    block_bytes = block_size_of(op[at.SIZE], parameters[at.KV_FORM])
    first, span_bytes, shift = layer_of(op, parameters)
    runs_at = address_of(runs)
    segment = max(first_block, whole * SEGMENT_BLOCKS)
    num_blocks = min((whole + 1) * SEGMENT_BLOCKS, end_block) - segment
    if per_page == 1:
        pages, here = table_at + segment * 4, runs_at + used * 8
        list_pages(pages, num_blocks, first, span_bytes, shift, kv_head, block_bytes, here)
    else:
        table = ints(table_at, (end_block + per_page - 1) // per_page)
        for i in range(num_blocks):
            page, part = (segment + i) // per_page, (segment + i) % per_page
            shape = (per_page, block_bytes)
            layer = (first, span_bytes, shift)
            address = block_at(layer, kv_head, np.int64(table[page]), part, shape)
            runs[used + 2 * i], runs[used + 2 * i + 1] = address, address + block_bytes
    repeat_last(runs_at, used + 2 * num_blocks, TABLE_RUNS)
    return segment, num_blocks


@fast_kernel
def list_first(op, parameters, items_at, unit, runs, used):  # type: ignore[no-untyped-def]
    """Write the runs of a unit's first segment behind `used`; return their number."""
    if unit < 0:
        return 0
    item, kv_head = unit_of(op, items_at, unit)
    table_at, _, _, first_block, end_block = rows_of(op, parameters, item)
    walked = (table_at, kv_head, first_block, end_block)
    return 2 * list_runs(op, parameters, walked, item[at.FIRST_SEGMENT], runs, used)[1]


@fast_kernel
def fetch_until(runs, asked, wanted, block_bytes):  # type: ignore[no-untyped-def]
    """Ask for runs from `asked` on until there are `wanted`; return how many there are then."""
    while asked < wanted:
        fetch_run(runs[asked], block_bytes)
        asked += 1
    return asked


@fast_kernel
def fetch_unit(op, parameters, items_at, unit, scratch):  # type: ignore[no-untyped-def]
    """Ask for what is read first of a unit that nothing was computed before."""
    runs = longs(scratch, TABLE_RUNS)
    num_runs = list_first(op, parameters, items_at, unit, runs, np.int64(0))
    block_bytes = block_size_of(op[at.SIZE], parameters[at.KV_FORM])
    fetch_until(runs, 0, min(num_runs, LEAD_RUNS), block_bytes)
