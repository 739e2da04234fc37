"""The inner loops of attention over bf16: a dot product of pairs does two sums at once.

A block of 16 rows of one KV head is keys [head_dim / 2][16 rows][2] and values [head_dim / 16][8 pairs of
rows][16 elements][2]. Queries and weights are rounded to bf16 too where the CPU has products of bf16, and stay
f32 where it has not.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast.intrinsics import (
    F32,
    HAS_BRAIN_DOT,
    I32,
    INTS,
    LANES,
    SHORTS,
    routine,
)
from headrace.backends.cpu.fast.kernels_attend_rows import (
    BLENDED_AT_ONCE,
    FEW,
    IS_LARGE,
    SCORE_ROW,
    STATE_BYTES,
    by_count,
    fetch,
    in_columns,
    join_total,
    keys_of,
    run_at,
    some_at_a_time,
)

PAIRS_AT_ONCE = (8, 4, 3, 2, 1) if IS_LARGE else (4, 3, 2, 1)
"""Numbers of vectors that share a read of the keys."""
NUMBER_BYTES = 2 if HAS_BRAIN_DOT else 4
"""Of a query's numbers and of weights."""
HAS_TWO_SUMS = IS_LARGE and not HAS_BRAIN_DOT
"""Whether even numbers' products and odd ones' are summed apart: one sum would wait for itself."""


def _rounded(e: Any, x: Any) -> Any:
    """16 f32 rounded to bf16, to even, as the upper halves of 32 bits, whose lower ones mean nothing."""
    builder = e.builder
    bits = builder.bitcast(x, INTS)
    odd = builder.and_(builder.lshr(bits, e.fill(16, INTS)), e.fill(1, INTS))
    rounded = builder.add(builder.add(bits, e.fill(0x7FFF, INTS)), odd)
    is_none = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_none, e.fill(0x7FC00000, INTS), rounded)


@routine()
def write_pairs(e: Any, keys: Any, values: Any, k: Any, v: Any, head_dim: Any, lane: Any) -> None:
    """Write one head's key and value as row `lane` of a block.

    A line of values has two rows, so that nobody else may write in the block meanwhile.
    """
    builder = e.builder
    pair_line = e.times(builder.sdiv(lane, e.integer(2)), 4 * LANES)
    is_odd = builder.icmp_signed("==", builder.srem(lane, e.integer(2)), e.integer(1))
    other = e.broadcast(builder.select(is_odd, I32(0xFFFF), I32(-65536)))
    down = e.broadcast(builder.select(is_odd, I32(0), I32(16)))
    with e.loop(builder.sdiv(head_dim, e.integer(LANES))) as loop:
        offset = e.times(loop.index, 4 * LANES)
        key = builder.lshr(_rounded(e, e.load(e.add(k, offset))), e.fill(16, INTS))
        pairs = builder.bitcast(builder.trunc(key, SHORTS), ir.VectorType(I32, LANES // 2))
        target = e.add(keys, e.add(e.times(loop.index, 2 * LANES * LANES), e.times(lane, 4)))
        for pair in range(LANES // 2):
            e.store(builder.extract_element(pairs, I32(pair)), target, 4 * LANES * pair)
        line = e.add(values, e.add(e.times(loop.index, 2 * LANES * LANES), pair_line))
        value = builder.and_(_rounded(e, e.load(e.add(v, offset))), e.fill(-65536, INTS))
        kept = builder.and_(e.load(line, INTS), other)
        e.store(builder.or_(kept, builder.lshr(value, down)), line)


def _add_products(
    e: Any, parts: list[Any], places: list[Any], sums: list[list[Any]], *, is_apart: bool = False
) -> None:
    """sums[v][i] += parts[i], pairs of bf16, times the two numbers at places[v].

    is_apart: of the one part there is, products of second numbers go to sums[v][1].
    """
    if HAS_BRAIN_DOT:
        for place, of_vector in zip(places, sums, strict=True):
            x = e.broadcast(e.load(place, I32))
            for part, total in zip(parts, of_vector, strict=False):
                e.set(total, e.dot_brain(e.get(total), part, x))
        return
    for number, widen in enumerate((e.widen_low, e.widen_high)):
        wide = [widen(part) for part in parts]
        for place, of_vector in zip(places, sums, strict=True):
            x = e.broadcast(e.load(place, F32, NUMBER_BYTES * number))
            of_number = of_vector[number:] if is_apart else of_vector
            for part, total in zip(wide, of_number, strict=False):
                e.set(total, e.fma(part, x, e.get(total)))


def store_numbers(e: Any, values: Any, target: Any, index: Any) -> None:
    """Store 16 f32 as `_add_products` reads them, `index` such runs behind `target`."""
    values = e.narrow(values) if HAS_BRAIN_DOT else values
    e.store(values, e.add(target, e.times(index, NUMBER_BYTES * LANES)))


def _at_once(known: int, most: int) -> int:
    """How many blocks or columns share the loop with `known` vectors, at most `most`."""
    return most if IS_LARGE else min(most, 6 // known) or 1


@routine()
def score_pairs(
    e: Any, q: Any, q_stride: Any, head_dim: Any, blocks: Any, ahead: Any, num_blocks: Any, out: Any,
    count: Any,
) -> None:  # fmt: skip
    """out[v, 16 b + i] = q[v] times row i of block b of `blocks`, a table of runs.

    While block b is read, run b of `ahead` is fetched, and for few vectors block b + 1 once more (see
    kernels_attend): they take one block at a time, whose lines are asked for in the order of memory.
    """
    pairs = e.builder.sdiv(head_dim, e.integer(2))

    def body(known: int) -> None:
        rows = [e.add(q, e.builder.mul(q_stride, e.integer(i))) for i in range(known)]
        sums = [[e.variable(e.fill(0.0)) for _ in range(2)] for _ in range(known)]

        def some(first: Any, together: int) -> None:
            here = [keys_of(e, blocks, e.add(first, i)) for i in range(together)]
            following = [run_at(e, ahead, e.add(first, i)) for i in range(together)]
            next_one = [keys_of(e, blocks, e.add(first, together))] if known <= FEW else []
            for pair in sums:
                for total in pair:
                    e.set(total, e.fill(0.0))
            with e.loop(pairs) as loop:
                line = e.times(loop.index, 4 * LANES)
                parts = [e.load(e.add(block, line), INTS) for block in here]
                for run in following:
                    fetch(e, e.add(run, line))
                for run in next_one:
                    fetch(e, e.add(run, line), again=True)
                offset = e.times(loop.index, 2 * NUMBER_BYTES)
                places = [e.add(row, offset) for row in rows]
                _add_products(e, parts, places, sums, is_apart=HAS_TWO_SUMS)
            target = e.add(out, e.times(first, 4 * LANES))
            for index, pair in enumerate(sums):
                found = [e.get(total) for total in pair]
                found = [e.builder.fadd(*found)] if HAS_TWO_SUMS else found[:together]
                for i, score in enumerate(found):
                    e.store(score, target, SCORE_ROW * index + 4 * LANES * i)

        is_one = known <= FEW or HAS_TWO_SUMS
        some_at_a_time(e, num_blocks, 1 if is_one else _at_once(known, 2), some)

    by_count(e, count, PAIRS_AT_ONCE, body)


@routine()
def blend_pairs(
    e: Any, weights: Any, blocks: Any, ahead: Any, num_rows: Any, head_dim: Any, totals: Any,
    states: Any, count: Any,
) -> None:  # fmt: skip
    """Let a segment's weighted sums of values join totals[v], for `count` vectors.

    `blocks` is a table of runs from its first values on; while block b is read, run b of `ahead` is fetched,
    and block b + 1 once more. What lies past num_rows counts as zero, whatever it is.
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
                for again, run in (
                    (False, run_at(e, ahead, index)),
                    (True, keys_of(e, blocks, e.add(index, 1))),
                ):
                    for i in range(together):
                        fetch(e, e.add(e.add(run, place), column_bytes * i), again=again)
                if mask is not None:
                    parts = [builder.and_(part, mask) for part in parts]
                offset = e.times(e.add(e.times(index, LANES // 2), pair), 2 * NUMBER_BYTES)
                _add_products(e, parts, [e.add(weights, offset) for weights in places], sums)

            with e.loop(whole_blocks) as loop:
                block = keys_of(e, blocks, loop.index)
                with e.loop(e.integer(LANES // 2)) as pair_loop:
                    add(block, loop.index, pair_loop.index, None)
            with builder.if_then(builder.icmp_signed(">", rest, e.integer(0))):
                block = keys_of(e, blocks, whole_blocks)
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
                    join_total(e, e.add(row, 4 * LANES * i), e.get(total), state)

        in_columns(e, head_dim, _at_once(known, 4), some)

    by_count(e, count, BLENDED_AT_ONCE, body)


@routine(floats=("scale",))
def query_pairs(e: Any, x: Any, scale: Any, out: Any, head_dim: Any) -> None:
    """out = x * scale."""
    spread = e.broadcast(scale)
    with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
        value = e.builder.fmul(e.load(e.add(x, e.times(loop.index, 4 * LANES))), spread)
        store_numbers(e, value, out, loop.index)
