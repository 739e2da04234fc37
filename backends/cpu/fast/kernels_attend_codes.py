"""The inner loops of attention over int8 with a scale per row: products of bytes do the sums, exactly.

A block of 16 rows of one KV head is keys [head_dim / 4][16 rows][4] of code + 128, then 16 scales f32, and
values [head_dim / 16][4 quads of rows][16 elements][4], then 16 scales f32. Queries are 256 * high + low and
weights 128 * high + low, in two bytes each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast.intrinsics import (
    BYTES,
    DOT_SHIFTS_SIGNED,
    F32,
    FLOATS,
    I32,
    INTS,
    LANES,
    routine,
)
from headrace.backends.cpu.fast.kernels_attend_rows import (
    BLENDED_AT_ONCE,
    FEW,
    SCORE_ROW,
    STATE_BYTES,
    STATE_SCALE,
    WEIGHT_LOWS,
    WEIGHT_STEP,
    by_count,
    fetch,
    in_columns,
    join_total,
    keys_of,
    run_at,
    some_at_a_time,
    spread_int,
)

QUERY_RECORD = 64
"""After the codes of a query: scale f32, 128 * sum of codes i32; what follows begins a line."""
CODES_AT_ONCE = (4, 3, 2, 1)
"""Numbers of vectors that share a read of the keys."""
_HIGHEST_QUERY = 127 * 256.0
SCALE_SHARE = (1 - 2.0**-18) / 127
"""Of a row's largest number, before its scale is rounded up."""


@routine()
def score_codes(
    e: Any, q: Any, q_stride: Any, head_dim: Any, blocks: Any, ahead: Any, num_blocks: Any, out: Any,
    count: Any,
) -> None:  # fmt: skip
    """What score_pairs does, for keys as codes; q[v] are high bytes, low bytes and a record."""
    builder = e.builder
    quads = builder.sdiv(head_dim, e.integer(4))

    def body(known: int) -> None:
        rows = [e.add(q, builder.mul(q_stride, e.integer(i))) for i in range(known)]
        lows = [e.add(row, head_dim) for row in rows]
        zero = e.fill(0, INTS)
        sums = [[[e.variable(zero) for _ in range(2)] for _ in range(2)] for _ in range(known)]

        def some(first: Any, together: int) -> None:
            here = [keys_of(e, blocks, e.add(first, i)) for i in range(together)]
            following = [run_at(e, ahead, e.add(first, i)) for i in range(together)]
            next_one = [keys_of(e, blocks, e.add(first, together + i)) for i in range(together)]
            next_one = next_one if known < FEW else []
            for of_row in sums:
                for total in (*of_row[0], *of_row[1]):
                    e.set(total, zero)
            apart = 1 if known >= 3 and together > 1 else 2
            with e.loop(builder.sdiv(quads, e.integer(apart))) as loop:
                for turn in range(apart):
                    quad = e.add(e.times(loop.index, apart), turn)
                    line, place = e.times(quad, 4 * LANES), e.times(quad, 4)
                    parts = [e.load(e.add(block, line), INTS) for block in here]
                    for run in following:
                        fetch(e, e.add(run, line))
                    for run in next_one:
                        fetch(e, e.add(run, line), again=True)
                    for index, of_row in enumerate(sums):
                        for half, total in zip((rows, lows), of_row, strict=True):
                            x = e.broadcast(e.load(e.add(half[index], place), I32))
                            for part, slot in zip(parts, total[turn:], strict=False):
                                e.set(slot, e.dot(e.get(slot), part, x, is_signed=True))
            for run in following + next_one:
                fetch(e, e.add(run, e.times(head_dim, LANES)))
            target = e.add(out, e.times(first, 4 * LANES))
            for index, (high, low) in enumerate(sums):
                record = e.add(lows[index], head_dim)
                scale = e.broadcast(e.load(record, F32))
                of_halves = [[e.get(slot) for slot in total] for total in (high, low)]
                if apart > 1:
                    of_halves = [[builder.add(*found)] for found in of_halves]
                for i in range(together):
                    whole = builder.shl(of_halves[0][i], e.fill(8, INTS))
                    whole = builder.add(whole, of_halves[1][i])
                    if DOT_SHIFTS_SIGNED:
                        whole = builder.sub(whole, e.broadcast(e.load(record, I32, 4)))
                    row_scales = e.load(e.add(here[i], e.times(head_dim, LANES)))
                    value = builder.fmul(builder.sitofp(whole, FLOATS), scale)
                    value = builder.fmul(value, row_scales)
                    e.store(value, target, SCORE_ROW * index + 4 * LANES * i)

        some_at_a_time(e, num_blocks, 1 if known < 3 else 2, some)

    by_count(e, count, CODES_AT_ONCE, body)


@routine()
def blend_codes(
    e: Any, weights: Any, blocks: Any, ahead: Any, num_rows: Any, head_dim: Any, totals: Any,
    states: Any, count: Any,
) -> None:  # fmt: skip
    """What blend_pairs does, for values and weights as codes; weights past num_rows are zero."""
    builder = e.builder
    column_bytes = LANES * LANES
    stride = e.times(head_dim, 4)
    quads = builder.sdiv(e.add(num_rows, 3), e.integer(4))
    zero = e.fill(0, INTS)

    def body(known: int) -> None:
        places = [e.add(weights, SCORE_ROW * i) for i in range(known)]
        sums = [[[e.variable(zero) for _ in range(2)] for _ in range(2)] for _ in range(known)]

        def some(first: Any, together: int) -> None:
            inside = e.times(first, column_bytes)
            for of_vector in sums:
                for high, low in of_vector[:together]:
                    e.set(high, zero)
                    e.set(low, zero)

            def add(block: Any, index: Any, quad: Any) -> None:
                place = e.add(inside, e.times(quad, 4 * LANES))
                line = e.add(block, place)
                parts = [e.load(line, INTS, column_bytes * i) for i in range(together)]
                for again, run in (
                    (False, run_at(e, ahead, index)),
                    (True, keys_of(e, blocks, e.add(index, 1))),
                ):
                    for i in range(together):
                        fetch(e, e.add(e.add(run, place), column_bytes * i), again=again)
                offset = e.add(e.times(index, WEIGHT_STEP), e.times(quad, 4))
                for codes, of_vector in zip(places, sums, strict=True):
                    for half in range(2):
                        code = e.load(e.add(codes, offset), I32, WEIGHT_LOWS * half)
                        for part, total in zip(parts, of_vector, strict=False):
                            dot = e.dot(
                                e.get(total[half]), e.broadcast(code), part, is_signed=False
                            )
                            e.set(total[half], dot)

            four = e.integer(LANES // 4)
            with e.loop(builder.sdiv(quads, four)) as loop:
                block = keys_of(e, blocks, loop.index)
                with e.loop(four) as quad_loop:
                    add(block, loop.index, quad_loop.index)
            last = builder.sdiv(quads, four)
            with builder.if_then(builder.icmp_signed("<", e.times(last, 4), quads)):
                block = keys_of(e, blocks, last)
                with e.loop(builder.srem(quads, four)) as quad_loop:
                    add(block, last, quad_loop.index)
            target = e.add(totals, e.times(first, 4 * LANES))
            for index, of_vector in enumerate(sums):
                row = e.add(target, builder.mul(stride, e.integer(index)))
                state = e.add(states, STATE_BYTES * index)
                scale = e.broadcast(e.load(state, F32, STATE_SCALE))
                for i, (high, low) in enumerate(of_vector[:together]):
                    whole = builder.shl(e.get(high), e.fill(7, INTS))
                    whole = builder.add(whole, e.get(low))
                    value = builder.fmul(builder.sitofp(whole, FLOATS), scale)
                    join_total(e, e.add(row, 4 * LANES * i), value, state)

        in_columns(e, head_dim, 2, some)

    by_count(e, count, BLENDED_AT_ONCE, body)


def _largest_size(e: Any, x: Any, head_dim: Any) -> Any:
    """The largest |x|, found among bits: a NaN is larger than all numbers. At least 1e-30."""
    most = e.variable(e.fill(0, INTS))
    with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
        bits = e.magnitude_bits(e.load(e.add(x, e.times(loop.index, 4 * LANES))))
        e.set(most, e.call("llvm.smax.v16i32", INTS, e.get(most), bits))
    return e.largest_magnitude(e.get(most))


@routine(floats=("scale",))
def query_codes(e: Any, x: Any, scale: Any, out: Any, head_dim: Any) -> None:
    """Write x * scale as high bytes, low bytes and a record."""
    builder = e.builder
    largest = _largest_size(e, x, head_dim)
    inverse = e.broadcast(builder.fdiv(F32(_HIGHEST_QUERY), largest))
    lows = e.add(out, head_dim)
    whole = e.variable(e.fill(0, INTS))
    with e.loop(builder.sdiv(head_dim, e.integer(LANES))) as loop:
        value = e.load(e.add(x, e.times(loop.index, 4 * LANES)))
        code = e.to_int(builder.fmul(value, inverse))
        high, low = e.split_bytes(code)
        e.set(
            whole, builder.add(e.get(whole), builder.add(builder.shl(high, e.fill(8, INTS)), low))
        )
        offset = e.times(loop.index, LANES)
        e.store(builder.trunc(high, BYTES), e.add(out, offset))
        e.store(builder.trunc(low, BYTES), e.add(lows, offset))
    record = e.add(lows, head_dim)
    e.store(builder.fmul(builder.fmul(largest, F32(1 / _HIGHEST_QUERY)), scale), record)
    e.store(builder.shl(e.sum_int_lanes(e.get(whole)), I32(7)), record, 4)


def _row_scale(e: Any, x: Any, head_dim: Any) -> Any:
    """The scale of a row as codes of -127 .. 127, of 16 bits, so that what is read back is exact.

    A row read back and written again gets the same scale and codes, though sums of its numbers are rounded on
    the way (kernels_hadamard): the largest counts as less by what a rounded one may be more.
    """
    builder = e.builder
    scale = builder.fmul(_largest_size(e, x, head_dim), F32(SCALE_SHARE))
    bits = builder.add(builder.bitcast(scale, I32), I32(255))
    whole = builder.bitcast(builder.and_(bits, I32(-256)), F32)
    return builder.select(builder.fcmp_unordered("uno", scale, scale), scale, whole)


@routine()
def write_codes(e: Any, keys: Any, values: Any, k: Any, v: Any, head_dim: Any, lane: Any) -> None:
    """Write one head's key, transformed, and its value as row `lane` of a block.

    A line of values has four rows, so that nobody else may write in the block meanwhile.
    """
    builder = e.builder
    scales = [_row_scale(e, x, head_dim) for x in (k, v)]
    inverses = [e.broadcast(builder.fdiv(F32(1.0), scale)) for scale in scales]
    quad_line = e.times(builder.sdiv(lane, e.integer(4)), 4 * LANES)
    shift = spread_int(e, e.times(builder.srem(lane, e.integer(4)), 8))
    other = builder.not_(builder.shl(e.fill(255, INTS), shift))
    with e.loop(builder.sdiv(head_dim, e.integer(LANES))) as loop:
        block, offset = e.times(loop.index, LANES * LANES), e.times(loop.index, 4 * LANES)
        key, value = (
            e.to_int(builder.fmul(e.load(e.add(x, offset)), inverse))
            for x, inverse in zip((k, v), inverses, strict=True)
        )
        codes = builder.xor(builder.trunc(key, BYTES), e.fill(128, BYTES))
        quads = builder.bitcast(codes, ir.VectorType(I32, LANES // 4))
        target = e.add(keys, e.add(block, e.times(lane, 4)))
        for quad in range(LANES // 4):
            e.store(builder.extract_element(quads, I32(quad)), target, 4 * LANES * quad)
        line = e.add(values, e.add(block, quad_line))
        code = builder.shl(builder.and_(value, e.fill(255, INTS)), shift)
        e.store(builder.or_(builder.and_(e.load(line, INTS), other), code), line)
    for target, scale in zip((keys, values), scales, strict=True):
        place = e.add(target, e.times(head_dim, LANES))
        e.store(scale, e.add(place, e.times(lane, 4)))
