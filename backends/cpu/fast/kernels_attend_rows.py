"""What the inner loops of attention share: tables of runs, scores to weights, joining segments.

Keys and values have one of two forms, PAIRS (kernels_attend_pairs) and CODES (kernels_attend_codes). A sum runs
over its pairs or quads in one fixed order however many vectors and blocks share the loop, and a row that is
hidden adds zero: a result depends on its own query and rows alone. Scores are in units of log2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast.intrinsics import (
    F32,
    FLOATS,
    HAS_TWO_PORTS,
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
SCALES_BYTES = 4 * LANES
FEW = 4
"""Vectors that a decode has at most, as far as reading is made fast for it: more are a prompt's."""
BLENDED_AT_ONCE = (4, 3, 2, 1)
"""Numbers of vectors that share a read of the values."""
LOW = -float("inf")
_LINE_BYTES = 64
_FIRST_INTO = 2 if HAS_TWO_PORTS else 3
"""Into which cache a line is asked for at first: Intel's second has three times as many lines under way."""


def block_bytes(head_dim: int, form: int) -> int:
    """Bytes of the keys, or the values, of 16 rows of one head."""
    if form == PAIRS:
        return 2 * LANES * head_dim
    return LANES * head_dim + SCALES_BYTES


def by_count(e: Any, count: Any, known: Sequence[int], body: Callable[[int], None]) -> None:
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


def keys_of(e: Any, blocks: Any, index: Any) -> Any:
    """The keys of block `index` of a table of runs; its values where `blocks` starts at a run of values."""
    return e.load(e.add(blocks, e.times(index, 16)), I64)


def run_at(e: Any, runs: Any, index: Any) -> Any:
    """Run `index` of a table of runs, keys or values."""
    return e.load(e.add(runs, e.times(index, 8)), I64)


def fetch(e: Any, address: Any, *, again: bool = False) -> None:
    """Ask for a line that is read soon; `again`: into the first-level cache, next."""
    e.prefetch(address, locality=3 if again else _FIRST_INTO)


@routine()
def fetch_run(e: Any, run: Any, num_bytes: Any) -> None:
    """Ask for all lines of a run."""
    with e.loop(e.builder.sdiv(num_bytes, e.integer(_LINE_BYTES))) as loop:
        fetch(e, e.add(run, e.times(loop.index, _LINE_BYTES)))


def some_at_a_time(e: Any, count: Any, most: int, body: Callable[[Any, int], None]) -> None:
    """body(first, most) as often as `count` allows, body(first, 1) for what is left."""
    many = e.integer(most)
    with e.loop(e.builder.sdiv(count, many)) as loop:
        body(e.times(loop.index, most), most)
    if most > 1:
        left = e.builder.srem(count, many)
        with e.loop(left) as loop:
            body(e.add(e.builder.sub(count, left), loop.index), 1)


def spread_int(e: Any, value: Any) -> Any:
    return e.broadcast(e.builder.trunc(value, I32))


def is_finite_low(e: Any, value: Any) -> Any:
    return e.builder.fcmp_ordered(">", value, F32(LOW))


def join_segment(e: Any, state: Any, top: Any, added: Any) -> None:
    """Let a segment's largest score and sum of weights join a state, and note both factors there."""
    builder = e.builder
    before = e.load(state, F32)
    most = e.call("llvm.maxnum.f32", F32, before, top)
    both = ir.Constant(FLOATS, [0.0] * LANES)
    for lane, value in enumerate((before, top)):
        both = builder.insert_element(both, builder.fsub(value, most), I32(lane))
    factors = e.exp2(both)
    kept, joined = (
        builder.select(is_finite_low(e, value), builder.extract_element(factors, I32(i)), F32(0.0))
        for i, value in enumerate((before, top))
    )
    total = builder.fadd(builder.fmul(e.load(state, F32, 4), kept), builder.fmul(added, joined))
    for index, value in enumerate((most, total, kept, joined)):
        e.store(value, state, 4 * index)


def hide_and_find_top(
    e: Any, scores: Any, num_blocks: Any, span: tuple[Any, Any], softcap: Any
) -> Any:
    """Cap the scores, give rows outside `span` the lowest one, and return the largest."""
    builder = e.builder
    first, last = span
    low, high = spread_int(e, first), spread_int(e, last)
    lanes = ir.Constant(INTS, list(range(LANES)))
    best = e.variable(e.fill(LOW))
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
            row = builder.add(lanes, spread_int(e, e.times(loop.index, LANES)))
            is_seen = builder.and_(
                builder.icmp_signed(">=", row, low), builder.icmp_signed("<", row, high)
            )
            value = builder.select(is_seen, e.get(slot), e.fill(LOW))
            e.store(value, place)
            e.set(best, e.largest(e.get(best), value))
    return e.max_lanes(e.get(best))


def weight_of(e: Any, score: Any, shift: Any) -> Any:
    """2**(score - shift), 0 for a hidden row."""
    is_hidden = e.builder.fcmp_ordered("==", score, e.fill(LOW))
    return e.builder.select(is_hidden, e.fill(0.0), e.exp2(e.builder.fsub(score, shift)))


def shift_of(e: Any, top: Any) -> Any:
    return e.broadcast(e.builder.select(is_finite_low(e, top), top, F32(0.0)))


def join_total(e: Any, place: Any, value: Any, state: Any) -> None:
    """total = total * the factor of what was + value * the factor of the segment."""
    kept, joined = (e.broadcast(e.load(state, F32, offset)) for offset in (8, 12))
    value = e.builder.fmul(value, joined)
    e.store(e.fma(e.load(place), kept, value), place)


def in_columns(e: Any, head_dim: Any, at_once: int, body: Callable[[Any, int], None]) -> None:
    """body(first, n): runs of `at_once` columns of 16 elements, then one by one."""
    some_at_a_time(e, e.builder.sdiv(head_dim, e.integer(LANES)), at_once, body)


@routine()
def join_partial(
    e: Any, partial: Any, partial_state: Any, head_dim: Any, total: Any, state: Any
) -> None:
    """Let one vector's sums of a segment, computed elsewhere, join its total as if computed here."""
    join_segment(e, state, e.load(partial_state, F32), e.load(partial_state, F32, 4))
    with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
        offset = e.times(loop.index, 4 * LANES)
        join_total(e, e.add(total, offset), e.load(e.add(partial, offset)), state)
