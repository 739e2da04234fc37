"""Paged attention for decodes and prefill chunks in one batch: softmax and sums in f32, by segments.

An item is (sequence, a few of its queries, a run of segments of rows), done once per KV head: the query
heads of a KV head share the blocks read. Each segment of 128 rows is summed on its own, then joins those
before it in its stretch, of a few segments; stretches join likewise. Both lie at fixed rows, so whether one
item walks all of them or several threads share them, the same numbers are added in the same order: items
share whole stretches, and whoever finishes last joins their sums.

Where keys and values come from memory they are what takes the time. A core drops requests while as many lines
are under way as it can keep track of. So lines are asked for at the pace at which others are read: LEAD_RUNS
before, in the order of memory, beyond the end of a segment and of an item, and a block before once more,
for those that were dropped.
"""

from __future__ import annotations

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel, inlined_kernel
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.intrinsics_threads import atomic_add
from headrace.backends.cpu.fast.kernels_attend_codes import (
    CODES_AT_ONCE,
    QUERY_RECORD,
    blend_codes,
    query_codes,
    score_codes,
)
from headrace.backends.cpu.fast.kernels_attend_pairs import (
    NUMBER_BYTES,
    PAIRS_AT_ONCE,
    blend_pairs,
    query_pairs,
    score_pairs,
)
from headrace.backends.cpu.fast.kernels_attend_rows import (
    BLENDED_AT_ONCE,
    FEW,
    PAIRS,
    SCORE_ROW,
    SEGMENT_BLOCKS,
    STATE_BYTES,
    block_bytes,
    fetch_run,
    list_pages,
    repeat_last,
)
from headrace.backends.cpu.fast.kernels_attend_weigh import (
    WEIGHED_AT_ONCE,
    cap_scores,
    hide_scores,
    join_partials,
    weigh_codes,
    weigh_pairs,
)
from headrace.backends.cpu.fast.kernels_hadamard import run_of
from headrace.backends.cpu.fast.kernels_rowwise import copy_scaled
from headrace.backends.cpu.kernels_rows import address_of, floats, ints, longs
from headrace.backends.cpu.kernels_vector import float_of_bits

MAX_VECTORS = 96 // NUMBER_BYTES
"""Query vectors (queries x heads that share a KV head) of one item: they stay in the first-level cache, with
their sums and a segment's keys and values."""
SEGMENT_ROWS = SEGMENT_BLOCKS * LANES
_MAX_STRETCH = 4
LEAD_RUNS = SEGMENT_BLOCKS + 2
"""How many runs are asked for before they are read, in the order of memory: a segment's keys are read before
its values, so that SEGMENT_BLOCKS are the least."""
TABLE_RUNS = 6 * SEGMENT_BLOCKS
"""Entries of a table of runs: where each block's keys and its values are, one after the other, of a segment
and of the one after it. The last is there several times, for those who ask for more than there is."""
_TABLE_BYTES = 8 * (TABLE_RUNS + 8)
NUM_ARGUMENTS = 6
"""Of attend_unit, in memory (see kernels_attend_unit)."""
_LOW = -float("inf")
_LOG2_E = np.float32(1.4426950408889634)
block_size_of = fast_kernel(block_bytes)
"""What the pool reckons with, for kernels."""


def score_rows(num_vectors: int) -> int:
    """How many rows of scores there are for vectors that are weighed four at once."""
    return (num_vectors + WEIGHED_AT_ONCE - 1) // WEIGHED_AT_ONCE * WEIGHED_AT_ONCE


_score_rows = fast_kernel(score_rows)


def scratch_bytes(head_dim: int, ratio: int) -> int:
    """Return what one worker needs for an item: a table of runs, queries, sums, scores and states."""
    vectors = score_rows(max(MAX_VECTORS, ratio))
    each = NUMBER_BYTES * head_dim + QUERY_RECORD + SCORE_ROW + 2 * sum_bytes(head_dim)
    return vectors * each + _TABLE_BYTES


def sum_bytes(head_dim: int) -> int:
    """Return what the sums of one vector and their state take."""
    return 4 * head_dim + STATE_BYTES


sum_bytes_of = fast_kernel(sum_bytes)


@fast_kernel
def stretch_of(kv_heads):  # type: ignore[no-untyped-def]
    """How many segments make a stretch: fewer stretches are fewer sums to join, and fewer items to share where
    there are few KV heads."""
    return min(kv_heads, _MAX_STRETCH)


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
def _reset(totals, num_vectors, head_dim):  # type: ignore[no-untyped-def]
    """Let sums of vectors, and their states behind them, be those of nothing."""
    floats(totals, num_vectors * head_dim)[:] = np.float32(0.0)
    state = floats(totals + num_vectors * head_dim * 4, num_vectors * (STATE_BYTES // 4))
    state[:] = np.float32(0.0)
    for vector in range(num_vectors):
        state[vector * (STATE_BYTES // 4)] = np.float32(_LOW)


@inlined_kernel
def _score(form, queries, stride, head_dim, blocks, ahead, num_blocks, scores, count):  # type: ignore[no-untyped-def]
    """Scores of `count` vectors with a segment: as many at once as there are routines for."""
    done = 0
    for most in PAIRS_AT_ONCE:
        if form != PAIRS and most > CODES_AT_ONCE[0]:
            continue
        while count - done >= most:
            q, out = queries + done * stride, scores + done * SCORE_ROW
            fetched = ahead if done == 0 else blocks
            if form == PAIRS:
                score_pairs(q, stride, head_dim, blocks, fetched, num_blocks, out, most)
            else:
                score_codes(q, stride, head_dim, blocks, fetched, num_blocks, out, most)
            done += most


@inlined_kernel
def _blend(form, scores, values, ahead, num_rows, head_dim, totals, states, count):  # type: ignore[no-untyped-def]
    done = 0
    for most in BLENDED_AT_ONCE:
        while count - done >= most:
            weights, state = scores + done * SCORE_ROW, states + done * STATE_BYTES
            total = totals + done * head_dim * 4
            fetched = ahead if done == 0 else values
            if form == PAIRS:
                blend_pairs(weights, values, fetched, num_rows, head_dim, total, state, most)
            else:
                blend_codes(weights, values, fetched, num_rows, head_dim, total, state, most)
            done += most


@fast_kernel
def _join_part(totals, part, num_vectors, head_dim):  # type: ignore[no-untyped-def]
    """Let sums of vectors over a stretch, and their states behind them, join the totals."""
    size, behind = head_dim * 4, num_vectors * head_dim * 4
    for first in range(0, num_vectors, WEIGHED_AT_ONCE):
        join_partials(
            part + first * size, part + behind + first * STATE_BYTES, head_dim,
            totals + first * size, totals + behind + first * STATE_BYTES,
            min(WEIGHED_AT_ONCE, num_vectors - first),
        )  # fmt: skip


@inlined_kernel
def _write_result(out, out_stride, count, ratio, head_dim, totals):  # type: ignore[no-untyped-def]
    """Divide by the sums of weights; a query that saw nothing gets zeros."""
    num_vectors = count * ratio
    state = floats(totals + num_vectors * head_dim * 4, num_vectors * (STATE_BYTES // 4))
    vector = 0
    for query in range(count):
        for head in range(ratio):
            total = state[vector * (STATE_BYTES // 4) + 1]
            share = np.float32(1.0) / total if total > np.float32(0.0) else np.float32(0.0)
            share = total if total != total else share
            target = out + query * out_stride + head * head_dim * 4
            copy_scaled(totals + vector * head_dim * 4, share, target, head_dim)
            vector += 1


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
def _rows_of(op, parameters, item):  # type: ignore[no-untyped-def]
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
def _list_runs(op, parameters, walked, whole, runs, used):  # type: ignore[no-untyped-def]
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
def _list_first(op, parameters, items_at, unit, runs, used):  # type: ignore[no-untyped-def]
    """Write the runs of a unit's first segment behind `used`; return their number."""
    if unit < 0:
        return 0
    item, kv_head = unit_of(op, items_at, unit)
    table_at, _, _, first_block, end_block = _rows_of(op, parameters, item)
    walked = (table_at, kv_head, first_block, end_block)
    return 2 * _list_runs(op, parameters, walked, item[at.FIRST_SEGMENT], runs, used)[1]


@fast_kernel
def _fetch_until(runs, asked, wanted, block_bytes):  # type: ignore[no-untyped-def]
    """Ask for runs from `asked` on until there are `wanted`; return how many there are then."""
    while asked < wanted:
        fetch_run(runs[asked], block_bytes)
        asked += 1
    return asked


@inlined_kernel
def _walk_segments(op, parameters, rows, walked, spans, following, places, form):  # type: ignore[no-untyped-def]
    """Let the segments first .. last - 1 join the sums; at the end of a stretch those join the totals, if there
    are any, or the next one's are `step` behind."""
    head_dim, ratio = op[at.SIZE], op[at.COUNT] // op[at.KV_COUNT]
    window = op[at.FORM]
    softcap = float_of_bits(np.int32(op[at.SECOND_NUMBER]))
    row, count = rows
    first, last, step = spans
    items_at, unit = following
    blocks, queries, stride, scores, sums, totals = places
    num_vectors, stretch = count * ratio, stretch_of(op[at.KV_COUNT])
    block_bytes = block_size_of(head_dim, form)
    runs, values = longs(blocks, TABLE_RUNS), blocks + 8
    segment, num_blocks = _list_runs(op, parameters, walked, first, runs, np.int64(0))
    asked = min(LEAD_RUNS, 2 * num_blocks)
    for whole in range(first, last):
        num_runs = 2 * num_blocks
        if whole + 1 < last:
            num_ahead = 2 * _list_runs(op, parameters, walked, whole + 1, runs, num_runs)[1]
        else:
            num_ahead = _list_first(op, parameters, items_at, unit, runs, num_runs)
        asked = _fetch_until(runs, asked, min(num_ahead, LEAD_RUNS), block_bytes)
        ahead = blocks + 8 * asked
        _score(form, queries, stride, head_dim, blocks, ahead, num_blocks, scores, num_vectors)
        ahead += 8 * num_blocks
        offset = segment * LANES
        if num_vectors <= FEW:  # nothing else is asked for meanwhile
            for number in range(min(num_vectors, num_blocks)):
                fetch_run(runs[asked + num_blocks + number], block_bytes)
        if softcap > np.float32(0.0):
            for vector in range(num_vectors):
                cap_scores(scores + vector * SCORE_ROW, num_blocks, softcap)
        for query in range(count):
            seen = row + query + 1 - offset
            hidden = max(-offset, seen - window) if window > 0 else -offset
            begin = 0 if hidden > 0 else max(0, seen) // LANES
            if begin < num_blocks:
                place, before = scores + query * ratio * SCORE_ROW, begin * LANES
                for head in range(ratio):
                    hide_scores(
                        place + head * SCORE_ROW + before * 4, num_blocks - begin, hidden - before,
                        seen - before,
                    )  # fmt: skip
        states = sums + num_vectors * head_dim * 4
        for first_one in range(0, num_vectors, WEIGHED_AT_ONCE):
            together = min(WEIGHED_AT_ONCE, num_vectors - first_one)
            place, state = scores + first_one * SCORE_ROW, states + first_one * STATE_BYTES
            if form == PAIRS:
                weigh_pairs(place, together, num_blocks, state)
            else:
                weigh_codes(place, together, num_blocks, state, values, head_dim)
        num_rows = min(num_blocks * LANES, row + count - offset)
        _blend(form, scores, values, ahead, num_rows, head_dim, sums, states, num_vectors)
        asked = min(asked, num_ahead)
        for i in range(num_ahead):
            runs[i] = runs[num_runs + i]
        segment, num_blocks = max(walked[2], (whole + 1) * SEGMENT_BLOCKS), num_ahead // 2
        if (whole + 1) % stretch == 0 or whole + 1 == last:
            if totals != 0:
                _join_part(totals, sums, num_vectors, head_dim)
                _reset(sums, num_vectors, head_dim)
            sums += step


@fast_kernel
def fetch_unit(op, parameters, items_at, unit, scratch):  # type: ignore[no-untyped-def]
    """Ask for what is read first of a unit that nothing was computed before."""
    runs = longs(scratch, TABLE_RUNS)
    num_runs = _list_first(op, parameters, items_at, unit, runs, np.int64(0))
    block_bytes = block_size_of(op[at.SIZE], parameters[at.KV_FORM])
    _fetch_until(runs, 0, min(num_runs, LEAD_RUNS), block_bytes)


@inlined_kernel
def attend_unit(op, parameters, items_at, unit, following, places, form):  # type: ignore[no-untyped-def]
    """Compute an item (see layout) for the query heads of one KV head.

    following: the unit this thread computes next, whose first segment is fetched meanwhile; -1: none.
    places: queries and results of row 0, scratch. form: PAIRS or CODES, a constant.
    """
    q, out, scratch = places
    item, kv_head = unit_of(op, items_at, unit)
    head_dim, ratio = op[at.SIZE], op[at.COUNT] // op[at.KV_COUNT]
    count = item[at.NUM_QUERIES]
    table_at, token, row, first_block, end_block = _rows_of(op, parameters, item)
    num_vectors = count * ratio
    stride = NUMBER_BYTES * head_dim + QUERY_RECORD
    queries = scratch + _TABLE_BYTES
    scores = queries + num_vectors * stride
    totals = scores + _score_rows(num_vectors) * SCORE_ROW
    softcap = float_of_bits(np.int32(op[at.SECOND_NUMBER]))
    scale = float_of_bits(np.int32(op[at.NUMBER]))
    scale = scale if softcap > np.float32(0.0) else scale * _LOG2_E
    if form != PAIRS:
        scale /= np.float32(run_of(head_dim))
    target = queries
    for query in range(token, token + count):
        source = q + query * op[at.IN_STRIDE] + kv_head * ratio * head_dim * 4
        for head in range(ratio):
            if form == PAIRS:
                query_pairs(source + head * head_dim * 4, scale, target, head_dim)
            else:
                query_codes(source + head * head_dim * 4, scale, target, head_dim)
            target += stride
    rows, walked = (row, count), (table_at, kv_head, first_block, end_block)
    first, last, is_shared = item[at.FIRST_SEGMENT], item[at.END_SEGMENT], item[at.SHARERS] > 1
    each, stretch = num_vectors * sum_bytes_of(head_dim), stretch_of(op[at.KV_COUNT])
    parts = parameters[at.PARTIALS] + item[at.PARTIAL] + kv_head * item[at.NUM_STRETCHES] * each
    before = first // stretch - item[at.LOWEST_SEGMENT] // stretch
    sums, step, joined = totals, 0, 0
    if is_shared:
        sums, step = parts + before * each, each
    elif item[at.NUM_STRETCHES] > 1:
        sums, joined = totals + each, totals
        _reset(totals, num_vectors, head_dim)
    for number in range((last - 1) // stretch - first // stretch + 1 if is_shared else 1):
        _reset(sums + number * step, num_vectors, head_dim)
    found = (scratch, queries, stride, scores, sums, joined)
    _walk_segments(
        op, parameters, rows, walked, (first, last, step), (items_at, following), found, form
    )
    if is_shared:
        arrived = parameters[at.ARRIVALS] + (item[at.ARRIVAL] + kv_head) * at.LINE_WORDS * 8
        if atomic_add(arrived, 1) + 1 < item[at.SHARERS]:
            return
        atomic_add(arrived, -item[at.SHARERS])
        _reset(totals, num_vectors, head_dim)
        for number in range(item[at.NUM_STRETCHES]):
            _join_part(totals, parts + number * each, num_vectors, head_dim)
    target = out + token * op[at.OUT_STRIDE] + kv_head * ratio * head_dim * 4
    _write_result(target, op[at.OUT_STRIDE], count, ratio, head_dim, totals)
