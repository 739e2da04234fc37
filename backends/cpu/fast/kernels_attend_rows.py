"""The inner loops of attention: scores, weights and weighted sums over blocks of 16 rows.

Keys and values have one of two forms. A block of 16 rows of one KV head is

- PAIRS: bf16. Keys [head_dim / 2][16 rows][2], values [head_dim / 16][8 pairs of rows][16 elements][2];
  queries and weights are rounded to bf16 too, and a dot product of pairs does both sums.
- CODES: int8 with a scale per row. Keys [head_dim / 4][16 rows][4] of code + 128, then 16 scales f32; values
  [head_dim / 16][4 quads of rows][16 elements][4], then 16 scales f32. Queries are 256 * high + low and
  weights 128 * high + low, in two bytes each, so that dot products of bytes do both sums, exactly.

A sum runs over its pairs or quads in one fixed order however many vectors and blocks share the loop, and a row
that is hidden adds zero: a result depends on its own query and rows alone. Scores are in units of log2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast.intrinsics import (
    BYTES,
    DOT_SHIFTS_SIGNED,
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    routine,
)

PAIRS, CODES = 0, 1
SEGMENT_BLOCKS = 8
"""Blocks whose scores are kept at once; sums of a segment start at zero, then join those before."""
SCORE_ROW = 4 * LANES * SEGMENT_BLOCKS
STATE_BYTES = 32
"""Of a vector: largest score, sum of weights, factor of what was, factor of the segment, scale of its codes."""
QUERY_RECORD = 16
"""After the codes of a query: scale f32, 128 * sum of codes i32."""
SCALES_BYTES = 4 * LANES
_LINE_BYTES = 64
_LOW = -float("inf")
_HIGHEST_QUERY = 127 * 256.0
_HIGHEST_WEIGHT = 127 * 128 + 127.0
_BYTE_BLOCK = 2 * LANES
"""Of one block's weights as codes: 16 high bytes, 16 low ones."""


def block_bytes(head_dim: int, form: int) -> int:
    """Bytes of the keys, or the values, of 16 rows of one head."""
    if form == PAIRS:
        return 2 * LANES * head_dim
    return LANES * head_dim + SCALES_BYTES


def _by_count(e: Any, count: Any, known: Sequence[int], body: Callable[[int], None]) -> None:
    """Emit `body(n)` for every n of `known`, and a jump to the one that is `count`."""
    end = e.builder.append_basic_block("count.end")
    choice = e.builder.switch(count, end)
    for number in known:
        block = e.builder.append_basic_block(f"count.{number}")
        choice.add_case(e.integer(number), block)
        e.builder.position_at_end(block)
        body(number)
        e.builder.branch(end)
    e.builder.position_at_end(end)


def _block(e: Any, blocks: Any, index: Any) -> Any:
    """The keys of block `index` of a table of runs; its values where `blocks` starts at a run of values."""
    return e.load(e.add(blocks, e.times(index, 16)), I64)


def _run(e: Any, runs: Any, index: Any) -> Any:
    """Run `index` of a table of runs, keys or values."""
    return e.load(e.add(runs, e.times(index, 8)), I64)


def _fetch(e: Any, address: Any) -> None:
    """Ask for a line of the next segment, into the second-level cache: it waits for more lines at once."""
    e.prefetch(address, locality=2)


@routine()
def fetch_run(e: Any, run: Any, num_bytes: Any) -> None:
    """Ask for all lines of a run."""
    with e.loop(e.builder.sdiv(num_bytes, e.integer(_LINE_BYTES))) as loop:
        _fetch(e, e.add(run, e.times(loop.index, _LINE_BYTES)))


def _two_at_a_time(e: Any, count: Any, body: Callable[[Any, int], None]) -> None:
    """body(first, 2) for all pairs below `count`, body(first, 1) for what is left."""
    two = e.integer(2)
    with e.loop(e.builder.sdiv(count, two)) as loop:
        body(e.times(loop.index, 2), 2)
    with e.loop(e.builder.srem(count, two)):
        body(e.builder.sub(count, e.integer(1)), 1)


# --- scores ---------------------------------------------------------------------

SCORED_AT_ONCE = (8, 4, 3, 2, 1)
"""Numbers of vectors that share a read of the keys, as pairs; as codes 4 at most."""


@routine()
def score_pairs(
    e: Any, q: Any, q_stride: Any, head_dim: Any, blocks: Any, ahead: Any, num_blocks: Any, out: Any,
    count: Any,
) -> None:  # fmt: skip
    """out[v, 16 b + i] = q[v] times row i of block b of `blocks`, a table of runs.

    While block b is read, run b of `ahead` is fetched.
    """
    pairs = e.builder.sdiv(head_dim, e.integer(2))

    def body(known: int) -> None:
        rows = [e.add(q, e.builder.mul(q_stride, e.integer(i))) for i in range(known)]
        sums = [[e.variable(e.fill(0.0)) for _ in range(2)] for _ in range(known)]

        def some(first: Any, together: int) -> None:
            here = [_block(e, blocks, e.add(first, i)) for i in range(together)]
            following = [_run(e, ahead, e.add(first, i)) for i in range(together)]
            for pair in sums:
                for total in pair:
                    e.set(total, e.fill(0.0))
            with e.loop(pairs) as loop:
                line = e.times(loop.index, 4 * LANES)
                parts = [e.load(e.add(block, line), INTS) for block in here]
                for run in following:
                    _fetch(e, e.add(run, line))
                for row, pair in zip(rows, sums, strict=True):
                    x = e.broadcast(e.load(e.add(row, e.times(loop.index, 4)), I32))
                    for part, total in zip(parts, pair, strict=False):
                        e.set(total, e.dot_brain(e.get(total), part, x))
            target = e.add(out, e.times(first, 4 * LANES))
            for index, pair in enumerate(sums):
                for i, total in enumerate(pair[:together]):
                    e.store(e.get(total), target, SCORE_ROW * index + 4 * LANES * i)

        _two_at_a_time(e, num_blocks, some)

    _by_count(e, count, SCORED_AT_ONCE, body)


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
            here = [_block(e, blocks, e.add(first, i)) for i in range(together)]
            following = [_run(e, ahead, e.add(first, i)) for i in range(together)]
            for of_row in sums:
                for total in (*of_row[0], *of_row[1]):
                    e.set(total, zero)
            with e.loop(quads) as loop:
                line, place = e.times(loop.index, 4 * LANES), e.times(loop.index, 4)
                parts = [e.load(e.add(block, line), INTS) for block in here]
                for run in following:
                    _fetch(e, e.add(run, line))
                for index, of_row in enumerate(sums):
                    for half, total in zip((rows, lows), of_row, strict=True):
                        x = e.broadcast(e.load(e.add(half[index], place), I32))
                        for part, slot in zip(parts, total, strict=False):
                            e.set(slot, e.dot(e.get(slot), part, x, is_signed=True))
            for run in following:
                _fetch(e, e.add(run, e.times(head_dim, LANES)))
            target = e.add(out, e.times(first, 4 * LANES))
            for index, (high, low) in enumerate(sums):
                record = e.add(lows[index], head_dim)
                scale = e.broadcast(e.load(record, F32))
                for i in range(together):
                    whole = builder.shl(e.get(high[i]), e.fill(8, INTS))
                    whole = builder.add(whole, e.get(low[i]))
                    if DOT_SHIFTS_SIGNED:
                        whole = builder.sub(whole, e.broadcast(e.load(record, I32, 4)))
                    row_scales = e.load(e.add(here[i], e.times(head_dim, LANES)))
                    value = builder.fmul(builder.sitofp(whole, FLOATS), scale)
                    value = builder.fmul(value, row_scales)
                    e.store(value, target, SCORE_ROW * index + 4 * LANES * i)

        _two_at_a_time(e, num_blocks, some)

    _by_count(e, count, SCORED_AT_ONCE[1:], body)


# --- weights --------------------------------------------------------------------


def _spread_int(e: Any, value: Any) -> Any:
    return e.broadcast(e.builder.trunc(value, I32))


def _is_finite_low(e: Any, value: Any) -> Any:
    return e.builder.fcmp_ordered(">", value, F32(_LOW))


def _join(e: Any, state: Any, top: Any, added: Any) -> None:
    """Let a segment's largest score and sum of weights join a state, and note both factors there."""
    builder = e.builder
    before = e.load(state, F32)
    most = e.call("llvm.maxnum.f32", F32, before, top)
    both = ir.Constant(FLOATS, [0.0] * LANES)
    for lane, value in enumerate((before, top)):
        both = builder.insert_element(both, builder.fsub(value, most), I32(lane))
    factors = e.exp2(both)
    kept, joined = (
        builder.select(_is_finite_low(e, value), builder.extract_element(factors, I32(i)), F32(0.0))
        for i, value in enumerate((before, top))
    )
    total = builder.fadd(builder.fmul(e.load(state, F32, 4), kept), builder.fmul(added, joined))
    for index, value in enumerate((most, total, kept, joined)):
        e.store(value, state, 4 * index)


def _hide_and_find_top(
    e: Any, scores: Any, num_blocks: Any, span: tuple[Any, Any], softcap: Any
) -> Any:
    """Cap the scores, give rows outside `span` the lowest one, and return the largest."""
    builder = e.builder
    first, last = span
    low, high = _spread_int(e, first), _spread_int(e, last)
    lanes = ir.Constant(INTS, list(range(LANES)))
    best = e.variable(e.fill(_LOW))
    rows = e.times(num_blocks, LANES)
    is_whole = builder.and_(
        builder.icmp_signed("<=", first, e.integer(0)), builder.icmp_signed(">=", last, rows)
    )
    is_plain = builder.and_(is_whole, builder.fcmp_ordered("<=", softcap, F32(0.0)))
    with builder.if_else(is_plain) as (plain, other):
        with plain, e.loop(num_blocks) as loop:
            value = e.load(e.add(scores, e.times(loop.index, 4 * LANES)))
            e.set(best, e.largest(e.get(best), value))
        with other, e.loop(num_blocks) as loop:
            place = e.add(scores, e.times(loop.index, 4 * LANES))
            slot = e.variable(e.load(place))
            with builder.if_then(builder.fcmp_ordered(">", softcap, F32(0.0))):
                cap = e.broadcast(softcap)
                capped = builder.fmul(e.tanh(builder.fdiv(e.get(slot), cap)), cap)
                e.set(slot, builder.fmul(capped, e.fill(1.4426950408889634)))
            row = builder.add(lanes, _spread_int(e, e.times(loop.index, LANES)))
            is_seen = builder.and_(
                builder.icmp_signed(">=", row, low), builder.icmp_signed("<", row, high)
            )
            value = builder.select(is_seen, e.get(slot), e.fill(_LOW))
            e.store(value, place)
            e.set(best, e.largest(e.get(best), value))
    return e.max_lanes(e.get(best))


def _weight(e: Any, score: Any, shift: Any) -> Any:
    """2**(score - shift), 0 for a hidden row."""
    is_hidden = e.builder.fcmp_ordered("==", score, e.fill(_LOW))
    return e.builder.select(is_hidden, e.fill(0.0), e.exp2(e.builder.fsub(score, shift)))


def _shift(e: Any, top: Any) -> Any:
    return e.broadcast(e.builder.select(_is_finite_low(e, top), top, F32(0.0)))


@routine(floats=("softcap",))
def weigh_pairs(
    e: Any, scores: Any, num_blocks: Any, first: Any, last: Any, softcap: Any, state: Any
) -> None:
    """Turn one vector's scores into weights as bf16, in their place; rows outside first .. last - 1 get 0."""
    top = _hide_and_find_top(e, scores, num_blocks, (first, last), softcap)
    shift, added = _shift(e, top), e.variable(e.fill(0.0))
    with e.loop(num_blocks) as loop:
        weight = _weight(e, e.load(e.add(scores, e.times(loop.index, 4 * LANES))), shift)
        e.set(added, e.builder.fadd(e.get(added), weight))
        e.store(e.narrow(weight), e.add(scores, e.times(loop.index, 2 * LANES)))
    _join(e, state, top, e.sum_lanes(e.get(added)))


@routine(floats=("softcap",))
def weigh_codes(
    e: Any, scores: Any, num_blocks: Any, first: Any, last: Any, softcap: Any, state: Any,
    values: Any, head_dim: Any,
) -> None:  # fmt: skip
    """What weigh_pairs does, with the scales of the values taken in: bytes and one scale for the segment.

    The largest weight is found among their bits, where a NaN is the largest: it becomes the scale.
    """
    builder = e.builder
    top = _hide_and_find_top(e, scores, num_blocks, (first, last), softcap)
    shift, added = _shift(e, top), e.variable(e.fill(0.0))
    most = e.variable(e.fill(0, INTS))
    with e.loop(num_blocks) as loop:
        place = e.add(scores, e.times(loop.index, 4 * LANES))
        score = e.load(place)
        weight = _weight(e, score, shift)
        e.set(added, builder.fadd(e.get(added), weight))
        row_scales = e.load(e.add(_block(e, values, loop.index), e.times(head_dim, LANES)))
        is_hidden = builder.fcmp_ordered("==", score, e.fill(_LOW))
        weight = builder.select(is_hidden, e.fill(0.0), builder.fmul(weight, row_scales))
        e.store(weight, place)
        bits = e.magnitude_bits(weight)
        e.set(most, e.call("llvm.smax.v16i32", INTS, e.get(most), bits))
    largest = e.largest_magnitude(e.get(most))
    inverse = e.broadcast(builder.fdiv(F32(_HIGHEST_WEIGHT), largest))
    with e.loop(num_blocks) as loop:
        weight = e.load(e.add(scores, e.times(loop.index, 4 * LANES)))
        code = builder.fptosi(e.round(builder.fmul(weight, inverse)), INTS)
        target = e.add(scores, e.times(loop.index, _BYTE_BLOCK))
        high = builder.lshr(code, e.fill(7, INTS))
        e.store(builder.trunc(high, BYTES), target)
        e.store(builder.trunc(builder.and_(code, e.fill(127, INTS)), BYTES), target, LANES)
    _join(e, state, top, e.sum_lanes(e.get(added)))
    e.store(builder.fmul(largest, F32(1 / _HIGHEST_WEIGHT)), state, 16)


# --- weighted sums --------------------------------------------------------------

BLENDED_AT_ONCE = (4, 3, 2, 1)
"""Numbers of vectors that share a read of the values."""


def _join_total(e: Any, place: Any, value: Any, state: Any) -> None:
    """total = total * the factor of what was + value * the factor of the segment."""
    kept, joined = (e.broadcast(e.load(state, F32, offset)) for offset in (8, 12))
    value = e.builder.fmul(value, joined)
    e.store(e.fma(e.load(place), kept, value), place)


def _columns(e: Any, head_dim: Any, at_once: int, body: Callable[[Any, int], None]) -> None:
    """body(first, n): runs of `at_once` columns of 16 elements, then one by one."""
    columns = e.builder.sdiv(head_dim, e.integer(LANES))
    many = e.integer(at_once)
    whole = e.builder.sdiv(columns, many)
    with e.loop(whole) as loop:
        body(e.times(loop.index, at_once), at_once)
    done = e.times(whole, at_once)
    with e.loop(e.builder.srem(columns, many)) as loop:
        body(e.builder.add(done, loop.index), 1)


@routine()
def blend_pairs(
    e: Any, weights: Any, blocks: Any, ahead: Any, num_rows: Any, head_dim: Any, totals: Any,
    states: Any, count: Any,
) -> None:  # fmt: skip
    """Let a segment's weighted sums of values join totals[v], for `count` vectors.

    `blocks` is a table of runs from its first values on; while block b is read, run b of `ahead` is fetched.
    What lies past num_rows counts as zero, whatever it is.
    """
    builder = e.builder
    column_bytes = 2 * LANES * LANES
    stride = e.times(head_dim, 4)
    whole_blocks = builder.sdiv(num_rows, e.integer(LANES))
    rest = builder.srem(num_rows, e.integer(LANES))
    rest_pairs = builder.sdiv(e.add(rest, 1), e.integer(2))
    is_odd = builder.icmp_signed("==", builder.srem(rest, e.integer(2)), e.integer(1))

    def body(known: int) -> None:
        places = [e.add(weights, SCORE_ROW * i) for i in range(known)]
        sums = [[e.variable(e.fill(0.0)) for _ in range(4)] for _ in range(known)]

        def some(first: Any, together: int) -> None:
            inside = e.times(first, column_bytes)
            for of_vector in sums:
                for total in of_vector[:together]:
                    e.set(total, e.fill(0.0))

            def add(block: Any, index: Any, pair: Any, mask: Any) -> None:
                place = e.add(inside, e.times(pair, 4 * LANES))
                line = e.add(block, place)
                parts = [e.load(line, INTS, column_bytes * i) for i in range(together)]
                following = e.add(_run(e, ahead, index), place)
                for i in range(together):
                    _fetch(e, e.add(following, column_bytes * i))
                if mask is not None:
                    parts = [builder.and_(part, mask) for part in parts]
                offset = e.add(e.times(index, 2 * LANES), e.times(pair, 4))
                for codes, of_vector in zip(places, sums, strict=True):
                    x = e.broadcast(e.load(e.add(codes, offset), I32))
                    for part, total in zip(parts, of_vector, strict=False):
                        e.set(total, e.dot_brain(e.get(total), part, x))

            with e.loop(whole_blocks) as loop:
                block = _block(e, blocks, loop.index)
                with e.loop(e.integer(LANES // 2)) as pair_loop:
                    add(block, loop.index, pair_loop.index, None)
            with builder.if_then(builder.icmp_signed(">", rest, e.integer(0))):
                block = _block(e, blocks, whole_blocks)
                with e.loop(rest_pairs) as pair_loop:
                    is_last = builder.icmp_signed("==", e.add(pair_loop.index, 1), rest_pairs)
                    is_half = builder.and_(is_last, is_odd)
                    mask = e.broadcast(builder.select(is_half, I32(0xFFFF), I32(-1)))
                    add(block, whole_blocks, pair_loop.index, mask)
            target = e.add(totals, e.times(first, 4 * LANES))
            for index, of_vector in enumerate(sums):
                row = e.add(target, builder.mul(stride, e.integer(index)))
                for i, total in enumerate(of_vector[:together]):
                    state = e.add(states, STATE_BYTES * index)
                    _join_total(e, e.add(row, 4 * LANES * i), e.get(total), state)

        _columns(e, head_dim, 4, some)

    _by_count(e, count, BLENDED_AT_ONCE, body)


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
                following = e.add(_run(e, ahead, index), place)
                for i in range(together):
                    _fetch(e, e.add(following, column_bytes * i))
                offset = e.add(e.times(index, _BYTE_BLOCK), e.times(quad, 4))
                for codes, of_vector in zip(places, sums, strict=True):
                    for half in range(2):
                        code = e.load(e.add(codes, offset), I32, LANES * half)
                        for part, total in zip(parts, of_vector, strict=False):
                            dot = e.dot(
                                e.get(total[half]), e.broadcast(code), part, is_signed=False
                            )
                            e.set(total[half], dot)

            four = e.integer(LANES // 4)
            with e.loop(builder.sdiv(quads, four)) as loop:
                block = _block(e, blocks, loop.index)
                with e.loop(four) as quad_loop:
                    add(block, loop.index, quad_loop.index)
            last = builder.sdiv(quads, four)
            with builder.if_then(builder.icmp_signed("<", e.times(last, 4), quads)):
                block = _block(e, blocks, last)
                with e.loop(builder.srem(quads, four)) as quad_loop:
                    add(block, last, quad_loop.index)
            target = e.add(totals, e.times(first, 4 * LANES))
            for index, of_vector in enumerate(sums):
                row = e.add(target, builder.mul(stride, e.integer(index)))
                state = e.add(states, STATE_BYTES * index)
                scale = e.broadcast(e.load(state, F32, 16))
                for i, (high, low) in enumerate(of_vector[:together]):
                    whole = builder.shl(e.get(high), e.fill(7, INTS))
                    whole = builder.add(whole, e.get(low))
                    value = builder.fmul(builder.sitofp(whole, FLOATS), scale)
                    _join_total(e, e.add(row, 4 * LANES * i), value, state)

        _columns(e, head_dim, 2, some)

    _by_count(e, count, BLENDED_AT_ONCE, body)


@routine()
def join_partial(
    e: Any, partial: Any, partial_state: Any, head_dim: Any, total: Any, state: Any
) -> None:
    """Let one vector's sums of a segment, computed elsewhere, join its total as if computed here."""
    _join(e, state, e.load(partial_state, F32), e.load(partial_state, F32, 4))
    with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
        offset = e.times(loop.index, 4 * LANES)
        _join_total(e, e.add(total, offset), e.load(e.add(partial, offset)), state)


# --- queries and rows -----------------------------------------------------------


@routine(floats=("scale",))
def query_pairs(e: Any, x: Any, scale: Any, out: Any, head_dim: Any) -> None:
    """out = x * scale as bf16."""
    spread = e.broadcast(scale)
    with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
        value = e.builder.fmul(e.load(e.add(x, e.times(loop.index, 4 * LANES))), spread)
        e.store(e.narrow(value), e.add(out, e.times(loop.index, 2 * LANES)))


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
        code = builder.fptosi(e.round(builder.fmul(value, inverse)), INTS)
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


@routine("float")
def row_scale(e: Any, x: Any, head_dim: Any) -> Any:
    """The scale of a row as codes of -127 .. 127: 17 bits, rounded up, so that 127 * scale is exact.

    A row read back and written again gets the same scale and codes.
    """
    builder = e.builder
    scale = builder.fdiv(_largest_size(e, x, head_dim), F32(127.0))
    bits = builder.add(builder.bitcast(scale, I32), I32(127))
    return builder.bitcast(builder.and_(bits, I32(-128)), F32)
