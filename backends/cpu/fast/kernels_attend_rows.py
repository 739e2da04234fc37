"""What the inner loops of attention share: tables of runs, where things are, joining segments.

Keys and values have one of two forms, PAIRS (kernels_attend_pairs) and CODES (kernels_attend_codes). A sum runs
over its pairs or quads in one fixed order however many vectors and blocks share the loop, and a row that is
hidden adds zero: a result depends on its own query and rows alone. Scores are in units of log2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import (
    F32,
    HAS_TWO_PORTS,
    I32,
    I64,
    LANES,
    LEVEL,
    routine,
)

PAIRS, CODES = 0, 1
IS_LARGE = capability.AVX512_VNNI == LEVEL
"""Whether there are registers for 16 sums of 16 numbers; else for 8, or less."""
SEGMENT_BLOCKS = 8
"""Blocks whose scores are kept at once; sums of a segment start at zero, then join those before."""
SCORE_ROW = 4 * LANES * SEGMENT_BLOCKS
STATE_BYTES, STATE_SCALE = 32, 16
"""Of a vector: largest score, sum of weights, factor of what was, factor of the segment, scale of its codes."""
WEIGHT_STEP, WEIGHT_LOWS = (LANES, SCORE_ROW // 4) if IS_LARGE else (2 * LANES, LANES)
"""From a block's weights as codes, their high bytes, to the next one's; to its low bytes."""
SCALES_BYTES = 4 * LANES
FEW = 4
"""Vectors that a decode has at most, as far as reading is made fast for it: more are a prompt's."""
BLENDED_AT_ONCE = (4, 3, 2, 1)
"""Numbers of vectors that share a read of the values."""
LOW = -float("inf")
_LINE_BYTES = 64
_PAGES, _PLACES = ir.VectorType(I32, SEGMENT_BLOCKS), ir.VectorType(I64, SEGMENT_BLOCKS)
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


@routine()
def list_pages(
    e: Any, pages: Any, count: Any, first: Any, span_bytes: Any, shift: Any, head: Any, run_bytes: Any,
    runs: Any,
) -> None:  # fmt: skip
    """Write where keys and values of up to 8 blocks of 16 rows are, which are the engine's blocks themselves.

    pages: their numbers, i4 [count]; first, span_bytes, shift: a layer's row of the pool's table. What is
    written behind the last one means nothing.
    """
    builder, last = e.builder, e.builder.sub(count, e.integer(1))
    page = ir.Constant(_PAGES, ir.Undefined)
    for lane in range(SEGMENT_BLOCKS):
        own = e.integer(lane)
        own = builder.select(builder.icmp_signed("<", last, own), last, own)
        number = e.load(e.add(pages, e.times(own, 4)), I32)
        page = builder.insert_element(page, number, I32(lane))
    page = builder.zext(page, _PLACES)
    one, head, shift, span_bytes, run_bytes, first = (
        e.broadcast(value, SEGMENT_BLOCKS)
        for value in (e.integer(1), head, shift, span_bytes, run_bytes, first)
    )
    inside = builder.and_(page, builder.sub(builder.shl(one, shift), one))
    inside = builder.add(inside, builder.shl(head, shift))
    keys = builder.add(first, builder.mul(builder.lshr(page, shift), span_bytes))
    keys = builder.add(keys, builder.mul(inside, builder.shl(run_bytes, one)))
    values = builder.add(keys, run_bytes)
    for half in (0, 4):
        lanes = [lane for index in range(half, half + 4) for lane in (index, index + 8)]
        e.store(e.pick(keys, values, lanes), e.add(runs, 16 * half))


@routine()
def repeat_last(e: Any, runs: Any, used: Any, end: Any) -> None:
    """Write the last of `used` runs behind them up to run `end`, and up to 7 further ones."""
    last = e.broadcast(run_at(e, runs, e.builder.sub(used, e.integer(1))), 8)
    behind = e.add(runs, e.times(used, 8))
    left = e.add(e.builder.sub(end, used), 7)
    with e.loop(e.builder.sdiv(left, e.integer(8))) as loop:
        e.store(last, e.add(behind, e.times(loop.index, 64)))


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


def join_total(e: Any, place: Any, value: Any, state: Any) -> None:
    """total = total * the factor of what was + value * the factor of the segment."""
    kept, joined = (e.broadcast(e.load(state, F32, offset)) for offset in (8, 12))
    value = e.builder.fmul(value, joined)
    e.store(e.fma(e.load(place), kept, value), place)


def in_columns(e: Any, head_dim: Any, at_once: int, body: Callable[[Any, int], None]) -> None:
    """body(first, n): runs of `at_once` columns of 16 elements, then one by one."""
    some_at_a_time(e, e.builder.sdiv(head_dim, e.integer(LANES)), at_once, body)
