"""Paged attention for decodes and prefill chunks in one batch: online softmax in f32 over bf16 rows.

Rows are kept in blocks of 16 per KV head. Keys: [head_dim / 2][16 rows][2], so that a vector holds one pair of
elements of 16 rows; values: [head_dim / 16][8 pairs of rows][16 elements][2]. Both widen with one instruction.

An item is (sequence, a few of its queries, KV head): its query heads share the blocks read. Scores of 8
blocks are kept, then weighted and added to the output, which fades when a larger score comes. These
segments lie at fixed rows and hidden rows add zeros, so that no result depends on who shares an item.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import F32, I32, I64, INTS, LANES, routine
from headrace.backends.cpu.fast.kernels_rowwise import copy_scaled
from headrace.backends.cpu.kernels_rows import floats, ints, longs

SEGMENT_BLOCKS = 8
MAX_VECTORS = 48
"""Query vectors (queries x heads that share a KV head) of one item."""
VECTORS_AT_ONCE = 4
_SCORE_ROW = 4 * LANES * SEGMENT_BLOCKS
_LOW = -float("inf")


def scratch_bytes(head_dim: int, ratio: int) -> int:
    """Return what one worker needs for an item: queries, sums, scores, states and block addresses."""
    vectors = max(MAX_VECTORS, ratio)
    return vectors * (8 * head_dim + _SCORE_ROW + 16) + 64 * SEGMENT_BLOCKS


def _by_count(e: Any, count: Any, body: Any) -> None:
    """Emit `body(n)` for every n that `count` may be, 1 to VECTORS_AT_ONCE, and a jump to the right one."""
    end = e.builder.append_basic_block("count.end")
    choice = e.builder.switch(count, end)
    for known in range(1, VECTORS_AT_ONCE + 1):
        block = e.builder.append_basic_block(f"count.{known}")
        choice.add_case(e.integer(known), block)
        e.builder.position_at_end(block)
        body(known)
        e.builder.branch(end)
    e.builder.position_at_end(end)


@routine()
def score_block(
    e: Any, q: Any, head_dim: Any, keys: Any, out: Any, ahead: Any, beside: Any, count: Any
) -> None:
    """out[v, 0:16] = q[v] times the 16 rows of a block, for `count` vectors of q.

    `ahead` and `beside` are blocks to prefetch meanwhile.
    """
    q_stride = e.times(head_dim, 4)
    pairs = e.builder.sdiv(head_dim, e.integer(2))

    def body(known: int) -> None:
        rows = [e.add(q, e.builder.mul(q_stride, e.integer(i))) for i in range(known)]
        sums = [[e.variable(e.fill(0.0)) for _ in range(2)] for _ in range(known)]
        with e.loop(pairs) as loop:
            line = e.times(loop.index, 64)
            e.prefetch(e.add(ahead, line))
            e.prefetch(e.add(beside, line))
            packed = e.load(e.add(keys, line), INTS)
            parts = (e.widen_low(packed), e.widen_high(packed))
            for row, pair in zip(rows, sums, strict=True):
                for index, (part, total) in enumerate(zip(parts, pair, strict=True)):
                    place = e.add(row, e.times(loop.index, 8))
                    value = e.broadcast(e.load(place, F32, 4 * index))
                    e.set(total, e.fma(part, value, e.get(total)))
        for index, (even, odd) in enumerate(sums):
            e.store(e.builder.fadd(e.get(even), e.get(odd)), out, _SCORE_ROW * index)

    _by_count(e, count, body)


@routine()
def add_values(
    e: Any, weights: Any, blocks: Any, num_rows: Any, head_dim: Any, out: Any, count: Any
) -> None:
    """out[v] += the sum over `num_rows` rows of weights[v, row] * value, for `count` vectors.

    `blocks` is the address of the addresses of the value blocks. Rows past num_rows are not touched.
    """
    builder = e.builder
    out_stride = e.times(head_dim, 4)

    def add_pair(column: Any, place: Any, totals: list[Any], known: int, is_whole: bool) -> None:
        packed = e.load(column, INTS)
        parts = [e.widen_low(packed)] + ([e.widen_high(packed)] if is_whole else [])
        for vector in range(known):
            for index, part in enumerate(parts):
                weight = e.broadcast(e.load(place, F32, _SCORE_ROW * vector + 4 * index))
                slot = totals[vector][index]
                e.set(slot, e.fma(part, weight, e.get(slot)))

    def body(known: int) -> None:
        pairs, odd = builder.sdiv(num_rows, e.integer(2)), builder.srem(num_rows, e.integer(2))
        whole_blocks = builder.sdiv(num_rows, e.integer(LANES))
        left = builder.srem(pairs, e.integer(LANES // 2))
        rows = [e.add(out, builder.mul(out_stride, e.integer(i))) for i in range(known)]
        totals = [[e.variable(e.fill(0.0)) for _ in range(2)] for _ in range(known)]
        with e.loop(builder.sdiv(head_dim, e.integer(LANES))) as columns:
            for row, (even, other) in zip(rows, totals, strict=True):
                e.set(even, e.load(e.add(row, e.times(columns.index, 64))))
                e.set(other, e.fill(0.0))
            inside = e.times(columns.index, 64 * LANES // 2)

            def block_of(index: Any, inside: Any = inside) -> Any:
                return e.add(e.load(e.add(blocks, e.times(index, 8)), I64), inside)

            with e.loop(whole_blocks) as block:
                column, place = block_of(block.index), e.add(weights, e.times(block.index, 64))
                for pair in range(LANES // 2):
                    add_pair(e.add(column, 64 * pair), e.add(place, 8 * pair), totals, known, True)
            has_rest = builder.icmp_signed(">", builder.add(left, odd), e.integer(0))
            with builder.if_then(has_rest):
                column, place = block_of(whole_blocks), e.add(weights, e.times(whole_blocks, 64))
                with e.loop(left) as pair_loop:
                    pair_line = e.times(pair_loop.index, 64)
                    pair_place = e.add(place, e.times(pair_loop.index, 8))
                    add_pair(e.add(column, pair_line), pair_place, totals, known, True)
                with builder.if_then(builder.icmp_signed("==", odd, e.integer(1))):
                    pair_place = e.add(place, e.times(left, 8))
                    add_pair(e.add(column, e.times(left, 64)), pair_place, totals, known, False)
            for row, (even, other) in zip(rows, totals, strict=True):
                value = builder.fadd(e.get(even), e.get(other))
                e.store(value, e.add(row, e.times(columns.index, 64)))

    _by_count(e, count, body)


def _spread_int(e: Any, value: Any) -> Any:
    return e.broadcast(e.builder.trunc(value, I32))


@routine(floats=("softcap",))
def weigh_scores(
    e: Any, scores: Any, num_blocks: Any, first: Any, last: Any, softcap: Any, state: Any,
    total: Any, head_dim: Any,
) -> None:  # fmt: skip
    """Turn one vector's scores into weights, hide rows outside first .. last - 1, and fade its sums.

    state is the largest score so far and the sum of weights, both f32; `total` [head_dim].
    """
    builder = e.builder
    low, high = _spread_int(e, first), _spread_int(e, last)
    lanes = ir.Constant(INTS, list(range(LANES)))
    best = e.variable(e.fill(_LOW))
    with e.loop(num_blocks) as loop:
        place = e.add(scores, e.times(loop.index, 64))
        slot = e.variable(e.load(place))
        with builder.if_then(builder.fcmp_ordered(">", softcap, F32(0.0))):
            cap = e.broadcast(softcap)
            e.set(slot, builder.fmul(e.tanh(builder.fdiv(e.get(slot), cap)), cap))
        row = builder.add(lanes, _spread_int(e, e.times(loop.index, LANES)))
        is_seen = builder.and_(
            builder.icmp_signed(">=", row, low), builder.icmp_signed("<", row, high)
        )
        value = builder.select(is_seen, e.get(slot), e.fill(_LOW))
        e.store(value, place)
        e.set(best, e.largest(e.get(best), value))
    before = e.load(state, F32)
    most = e.call("llvm.maxnum.f32", F32, before, e.max_lanes(e.get(best)))
    is_visible = builder.fcmp_ordered(">", most, F32(_LOW))
    shift = e.broadcast(builder.select(is_visible, most, F32(0.0)))
    added = e.variable(e.fill(0.0))
    with e.loop(num_blocks) as loop:
        place = e.add(scores, e.times(loop.index, 64))
        score = e.load(place)
        weight = e.exp(builder.fsub(score, shift))
        is_hidden = builder.fcmp_ordered("==", score, e.fill(_LOW))
        weight = builder.select(is_hidden, e.fill(0.0), weight)
        e.store(weight, place)
        e.set(added, builder.fadd(e.get(added), weight))
    e.store(most, state)
    grew = builder.and_(
        builder.fcmp_ordered(">", most, before), builder.fcmp_ordered(">", before, F32(_LOW))
    )
    kept = e.variable(e.load(state, F32, 4))
    with builder.if_then(grew):
        fade = e.exp(builder.fsub(e.broadcast(before), e.broadcast(most)))
        e.set(kept, builder.fmul(e.get(kept), builder.extract_element(fade, I32(0))))
        with e.loop(builder.sdiv(head_dim, e.integer(LANES))) as loop:
            place = e.add(total, e.times(loop.index, 64))
            e.store(builder.fmul(e.load(place), fade), place)
    e.store(builder.fadd(e.get(kept), e.sum_lanes(e.get(added))), state, 4)


@fast_kernel
def attend_item(  # type: ignore[no-untyped-def]
    q, q_stride, out, out_stride, keys, values, table_at, blocks_per_page, kv_len, num_queries,
    first_query, count, kv_head, num_kv_heads, ratio, head_dim, scale, softcap, window, scratch,
):  # fmt: skip
    """Compute `count` queries of a sequence for the query heads of one KV head.

    `q` and `out` are of the sequence's first query of this step. A page is a block of the engine's
    table: `blocks_per_page` blocks of 16 rows.
    """
    num_vectors = count * ratio
    row_bytes = head_dim * 4
    queries = scratch
    totals = queries + num_vectors * row_bytes
    scores = totals + num_vectors * row_bytes
    states_at = scores + num_vectors * _SCORE_ROW
    blocks_at = states_at + num_vectors * 16
    states = floats(states_at, num_vectors * 4)
    key_blocks = longs(blocks_at, SEGMENT_BLOCKS + 1)
    value_blocks = longs(blocks_at + 8 * (SEGMENT_BLOCKS + 1), SEGMENT_BLOCKS)
    for i in range(count):
        source = q + (first_query + i) * q_stride + kv_head * ratio * row_bytes
        copy_scaled(source, scale, queries + i * ratio * row_bytes, ratio * head_dim)
    floats(totals, num_vectors * head_dim)[:] = np.float32(0.0)
    for vector in range(num_vectors):
        states[4 * vector] = np.float32(_LOW)
        states[4 * vector + 1] = np.float32(0.0)
    row = kv_len - num_queries + first_query
    end = row + count
    start = max(0, row + 1 - window) if window > 0 else 0
    first_block, end_block = start // LANES, (end + LANES - 1) // LANES
    table = ints(table_at, (end_block + blocks_per_page - 1) // blocks_per_page)
    block_bytes = LANES * head_dim * 2
    for whole in range(first_block // SEGMENT_BLOCKS, (end_block - 1) // SEGMENT_BLOCKS + 1):
        segment = max(first_block, whole * SEGMENT_BLOCKS)
        num_blocks = min((whole + 1) * SEGMENT_BLOCKS, end_block) - segment
        for i in range(num_blocks + 1):
            block = min(segment + i, end_block - 1)
            page = np.int64(table[block // blocks_per_page])
            index = (page * num_kv_heads + kv_head) * blocks_per_page + block % blocks_per_page
            key_blocks[i] = keys + index * block_bytes
            if i < num_blocks:
                value_blocks[i] = values + index * block_bytes
        for vector in range(0, num_vectors, VECTORS_AT_ONCE):
            at_once = min(VECTORS_AT_ONCE, num_vectors - vector)
            for i in range(num_blocks):
                score_block(
                    queries + vector * row_bytes, head_dim, key_blocks[i],
                    scores + vector * _SCORE_ROW + i * 4 * LANES,
                    key_blocks[i + 1], value_blocks[i], at_once,
                )  # fmt: skip
        offset = segment * LANES
        for vector in range(num_vectors):
            last = row + vector // ratio + 1
            first = max(0, last - window) if window > 0 else 0
            weigh_scores(
                scores + vector * _SCORE_ROW, num_blocks, first - offset, last - offset, softcap,
                states_at + vector * 16, totals + vector * row_bytes, head_dim,
            )  # fmt: skip
        num_rows = min(num_blocks * LANES, end - offset)
        for vector in range(0, num_vectors, VECTORS_AT_ONCE):
            add_values(
                scores + vector * _SCORE_ROW, blocks_at + 8 * (SEGMENT_BLOCKS + 1), num_rows, head_dim,
                totals + vector * row_bytes, min(VECTORS_AT_ONCE, num_vectors - vector),
            )  # fmt: skip
    for i in range(count):
        target = out + (first_query + i) * out_stride + kv_head * ratio * row_bytes
        for head in range(ratio):
            vector = i * ratio + head
            total = states[4 * vector + 1]
            share = np.float32(1.0) / total if total > np.float32(0.0) else np.float32(0.0)
            share = total if total != total else share
            copy_scaled(totals + vector * row_bytes, share, target + head * row_bytes, head_dim)
