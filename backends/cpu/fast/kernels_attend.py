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
from headrace.backends.cpu.fast.kernels_attend_lists import (
    LEAD_RUNS,
    TABLE_BYTES,
    TABLE_RUNS,
    block_size_of,
    fetch_unit,
    fetch_until,
    list_first,
    list_runs,
    rows_of,
    unit_of,
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
    fetch_run,
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
from headrace.backends.cpu.kernels_rows import floats, longs
from headrace.backends.cpu.kernels_vector import float_of_bits

MAX_VECTORS = 96 // NUMBER_BYTES
"""Query vectors (queries x heads that share a KV head) of one item: they stay in the first-level cache, with
their sums and a segment's keys and values."""
SEGMENT_ROWS = SEGMENT_BLOCKS * LANES
_MAX_STRETCH = 4
NUM_ARGUMENTS = 6
"""Of attend_unit, in memory: kernels_program.run_attention writes them."""
_LOW = -float("inf")
_LOG2_E = np.float32(1.4426950408889634)


def score_rows(num_vectors: int) -> int:
    """How many rows of scores there are for vectors that are weighed four at once."""
    return (num_vectors + WEIGHED_AT_ONCE - 1) // WEIGHED_AT_ONCE * WEIGHED_AT_ONCE


_score_rows = fast_kernel(score_rows)


def scratch_bytes(head_dim: int, ratio: int) -> int:
    """Return what one worker needs for an item: a table of runs, queries, sums, scores and states."""
    vectors = score_rows(max(MAX_VECTORS, ratio))
    each = NUMBER_BYTES * head_dim + QUERY_RECORD + SCORE_ROW + 2 * sum_bytes(head_dim)
    return vectors * each + TABLE_BYTES


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
    segment, num_blocks = list_runs(op, parameters, walked, first, runs, np.int64(0))
    asked = min(LEAD_RUNS, 2 * num_blocks)
    for whole in range(first, last):
        num_runs = 2 * num_blocks
        if whole + 1 < last:
            num_ahead = 2 * list_runs(op, parameters, walked, whole + 1, runs, num_runs)[1]
        else:
            num_ahead = list_first(op, parameters, items_at, unit, runs, num_runs)
        asked = fetch_until(runs, asked, min(num_ahead, LEAD_RUNS), block_bytes)
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


@inlined_kernel
def _write_queries(op, source, count, target, stride, form):  # type: ignore[no-untyped-def]
    """Write the queries of `count` tokens, of the heads that share a KV head, as scores are made of them."""
    head_dim, ratio = op[at.SIZE], op[at.COUNT] // op[at.KV_COUNT]
    softcap = float_of_bits(np.int32(op[at.SECOND_NUMBER]))
    scale = float_of_bits(np.int32(op[at.NUMBER]))
    scale = scale if softcap > np.float32(0.0) else scale * _LOG2_E
    if form != PAIRS:
        scale /= np.float32(run_of(head_dim))
    for query in range(count):
        for head in range(ratio):
            x = source + query * op[at.IN_STRIDE] + head * head_dim * 4
            if form == PAIRS:
                query_pairs(x, scale, target, head_dim)
            else:
                query_codes(x, scale, target, head_dim)
            target += stride


@inlined_kernel
def attend_unit(arguments_at, unit, following, form):  # type: ignore[no-untyped-def]
    """Compute an item (see layout) for the query heads of one KV head.

    arguments_at: of operation, parameters and items, queries and results of row 0, and scratch: where each is.
    unit: -1: only ask for what the following one reads first. following: the unit this thread computes next,
    whose first segment is fetched meanwhile; -1: none. form: PAIRS or CODES, a constant.
    """
    a = longs(arguments_at, NUM_ARGUMENTS)
    op, parameters = longs(a[0], at.NUM_FIELDS), longs(a[1], at.NUM_PARAMETERS)
    items_at, q, out, scratch = a[2], a[3], a[4], a[5]
    if unit < 0:
        fetch_unit(op, parameters, items_at, following, scratch)
        return
    item, kv_head = unit_of(op, items_at, unit)
    head_dim, ratio = op[at.SIZE], op[at.COUNT] // op[at.KV_COUNT]
    count = item[at.NUM_QUERIES]
    table_at, token, row, first_block, end_block = rows_of(op, parameters, item)
    num_vectors = count * ratio
    stride = NUMBER_BYTES * head_dim + QUERY_RECORD
    queries = scratch + TABLE_BYTES
    scores = queries + num_vectors * stride
    totals = scores + _score_rows(num_vectors) * SCORE_ROW
    source = q + token * op[at.IN_STRIDE] + kv_head * ratio * head_dim * 4
    _write_queries(op, source, count, queries, stride, form)
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
