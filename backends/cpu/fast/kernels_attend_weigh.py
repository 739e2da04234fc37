"""Scores become weights, of four vectors at once: of one, most of it is waiting for one number after the other.

The largest score, the sum of weights and the factors that join a segment to those before it are found by
transposing while the vectors are reduced. Where there are fewer than four the last one is computed in the place
of those that are missing too: its weights are the same bits in any place. Scores are in units of log2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast.intrinsics import BYTES, F32, I32, INTS, LANES, routine
from headrace.backends.cpu.fast.intrinsics_reductions import (
    larger_float,
    larger_unsigned,
    of_four,
    sum_float,
)
from headrace.backends.cpu.fast.kernels_attend_pairs import store_numbers
from headrace.backends.cpu.fast.kernels_attend_rows import (
    IS_LARGE,
    LOW,
    SCORE_ROW,
    STATE_BYTES,
    STATE_SCALE,
    WEIGHT_LOWS,
    WEIGHT_STEP,
    join_total,
    keys_of,
    spread_int,
)

WEIGHED_AT_ONCE = 4
_TOGETHER = WEIGHED_AT_ONCE if IS_LARGE else 1
"""Vectors that share a loop, as far as there are registers."""
_FLOATS4, _INTS4 = ir.VectorType(F32, 4), ir.VectorType(I32, 4)
_ROW = 4 * LANES
_LEAST, _HIGHEST = 1e-30, 127 * 128 + 127.0
"""A largest weight counts as no less; its code."""


@routine(floats=("softcap",))
def cap_scores(e: Any, scores: Any, num_blocks: Any, softcap: Any) -> None:
    """softcap * tanh(score / softcap), from scores as they are to units of log2."""
    builder, cap = e.builder, e.broadcast(softcap)
    with e.loop(num_blocks) as loop:
        place = e.add(scores, e.times(loop.index, _ROW))
        capped = builder.fmul(e.tanh(builder.fdiv(e.load(place), cap)), cap)
        e.store(builder.fmul(capped, e.fill(1.4426950408889634)), place)


@routine()
def hide_scores(e: Any, scores: Any, num_blocks: Any, first: Any, last: Any) -> None:
    """Give one vector's rows outside first .. last - 1 the lowest score."""
    builder = e.builder
    low, high = spread_int(e, first), spread_int(e, last)
    lanes = ir.Constant(INTS, list(range(LANES)))
    with e.loop(num_blocks) as loop:
        place = e.add(scores, e.times(loop.index, _ROW))
        row = builder.add(lanes, spread_int(e, e.times(loop.index, LANES)))
        is_seen = builder.and_(
            builder.icmp_signed(">=", row, low), builder.icmp_signed("<", row, high)
        )
        e.store(builder.select(is_seen, e.load(place), e.fill(LOW)), place)


@routine()
def weigh_pairs(e: Any, scores: Any, count: Any, num_blocks: Any, states: Any) -> None:
    """Turn the scores of `count` <= 4 vectors into weights in their place, and join their states."""
    four = _Four(e, scores, count, states)

    def store(number: int, index: Any, weight: Any, _: Any) -> None:
        store_numbers(e, weight, four.targets[number], index)

    four.join(*four.weigh(num_blocks, store))


@routine()
def weigh_codes(
    e: Any, scores: Any, count: Any, num_blocks: Any, states: Any, values: Any, head_dim: Any
) -> None:
    """The same with the scales of the values taken in: bytes, and one scale for the segment.

    The largest weight is found among their bits, where a NaN is the largest: it becomes the scale.
    """
    builder, four = e.builder, _Four(e, scores, count, states)
    most = [e.variable(e.fill(0, INTS)) for _ in range(WEIGHED_AT_ONCE)]

    def store(number: int, index: Any, weight: Any, is_hidden: Any) -> None:
        row_scales = e.load(e.add(keys_of(e, values, index), e.times(head_dim, LANES)))
        weight = builder.select(is_hidden, e.fill(0.0), builder.fmul(weight, row_scales))
        bits = builder.bitcast(weight, INTS)
        e.set(most[number], larger_unsigned(e, e.get(most[number]), bits))
        e.store(weight, e.add(four.targets[number], e.times(index, _ROW)))

    four.join(*four.weigh(num_blocks, store))
    bits = of_four(e, [e.get(slot) for slot in most], larger_unsigned)
    bits = builder.and_(bits, e.fill(0x7FFFFFFF, _INTS4))
    largest, least = builder.bitcast(bits, _FLOATS4), e.fill(_LEAST, _FLOATS4)
    largest = builder.select(builder.fcmp_ordered("<", largest, least), least, largest)
    inverse = builder.fdiv(e.fill(_HIGHEST, _FLOATS4), largest)
    for number, target in enumerate(four.targets):
        _store_codes(e, target, num_blocks, _lane(e, inverse, number))
    scale = builder.fmul(largest, e.fill(1 / _HIGHEST, _FLOATS4))
    for number in reversed(range(WEIGHED_AT_ONCE)):
        value = builder.extract_element(scale, I32(number))
        e.store(value, four.states[number], STATE_SCALE)


def _store_codes(e: Any, target: Any, num_blocks: Any, inverse: Any) -> None:
    """Write one vector's weights as 128 * high + low over the weights themselves, in two bytes each."""
    builder = e.builder
    at_once = 4 if IS_LARGE else 1
    last = builder.sub(num_blocks, e.integer(1))
    with e.loop(builder.sdiv(e.add(num_blocks, at_once - 1), e.integer(at_once))) as loop:
        first = e.times(loop.index, at_once)
        codes = []
        for number in range(at_once):
            block = e.add(first, number)
            block = builder.select(builder.icmp_signed("<", last, block), last, block)
            weight = e.load(e.add(target, e.times(block, _ROW)))
            codes.append(e.to_int(builder.fmul(weight, inverse)))
        highs = [builder.lshr(code, e.fill(7, INTS)) for code in codes]
        lows = [builder.and_(code, e.fill(127, INTS)) for code in codes]
        for parts, offset in ((highs, 0), (lows, WEIGHT_LOWS)):
            joined = e.join_bytes(parts) if IS_LARGE else builder.trunc(parts[0], BYTES)
            e.store(joined, e.add(target, e.times(first, WEIGHT_STEP)), offset)


def _lane(e: Any, four: Any, number: int) -> Any:
    """One of four numbers in every lane."""
    return e.pick(four, four, [number] * LANES)


class _Four:
    """The scores and the states of up to four vectors."""

    def __init__(self, e: Any, scores: Any, count: Any, states: Any) -> None:
        here = _clamped(e, count)
        self._e = e
        self._sources = [e.add(scores, e.times(number, SCORE_ROW)) for number in here]
        self.targets = [e.add(scores, SCORE_ROW * number) for number in range(WEIGHED_AT_ONCE)]
        self.states = [e.add(states, e.times(number, STATE_BYTES)) for number in here]

    def weigh(
        self, num_blocks: Any, store: Callable[[int, Any, Any, Any], None]
    ) -> tuple[Any, Any]:
        """store(number, index of a block, weights, whether hidden); return largest scores and sums, f32 [4]."""
        e, builder = self._e, self._e.builder
        top = self._tops(num_blocks)
        is_any = builder.fcmp_ordered(">", top, e.fill(LOW, _FLOATS4))
        shift = builder.select(is_any, top, e.fill(0.0, _FLOATS4))
        added = [e.variable(e.fill(0.0)) for _ in self.targets]
        for first in range(0, WEIGHED_AT_ONCE, _TOGETHER):
            numbers = range(first, first + _TOGETHER)
            shifts = [_lane(e, shift, number) for number in numbers]
            with e.loop(num_blocks) as loop:
                offset = e.times(loop.index, _ROW)
                scores = [e.load(e.add(self._sources[number], offset)) for number in numbers]
                for number, score, less in zip(numbers, scores, shifts, strict=True):
                    is_hidden = builder.fcmp_ordered("==", score, e.fill(LOW))
                    weight = e.exp2(builder.fsub(score, less))
                    e.set(added[number], builder.fadd(e.get(added[number]), weight))
                    store(number, loop.index, weight, is_hidden)
        return top, of_four(e, [e.get(slot) for slot in added], sum_float)

    def _tops(self, num_blocks: Any) -> Any:
        e = self._e
        best = [e.variable(e.fill(LOW)) for _ in self._sources]
        with e.loop(num_blocks) as loop:
            for source, slot in zip(self._sources, best, strict=True):
                value = e.load(e.add(source, e.times(loop.index, _ROW)))
                e.set(slot, larger_float(e, value, e.get(slot)))
        return of_four(e, [e.get(slot) for slot in best], larger_float)

    def join(self, top: Any, added: Any) -> None:
        """Let the segment join the states: the last vector's own comes last of those in its place."""
        rows = [self._e.load(state, _FLOATS4) for state in self.states]
        joined = _join_states(self._e, rows, top, added)
        for row, state in reversed(list(zip(joined, self.states, strict=True))):
            self._e.store(row, state)


def _join_states(e: Any, rows: Sequence[Any], top: Any, added: Any) -> Sequence[Any]:
    """Let a segment's largest scores and sums of weights join four states, and note both factors there."""
    builder = e.builder
    before, total, _, _ = _transposed(e, rows)
    most = larger_float(e, before, top)
    below = [builder.fsub(value, most) for value in (before, top)]
    factors = e.exp2(e.pick(*below, [lane % 8 for lane in range(LANES)]))
    zero, low = e.fill(0.0, _FLOATS4), e.fill(LOW, _FLOATS4)
    kept, joined = (
        builder.select(
            builder.fcmp_ordered(">", value, low),
            e.pick(factors, factors, range(first, first + 4)),
            zero,
        )
        for value, first in ((before, 0), (top, 4))
    )
    total = builder.fadd(builder.fmul(total, kept), builder.fmul(added, joined))
    return _transposed(e, (most, total, kept, joined))


def _transposed(e: Any, rows: Sequence[Any]) -> Sequence[Any]:
    """Four vectors of four."""
    halves = [
        [e.pick(rows[f], rows[f + 1], lanes) for f in (0, 2)]
        for lanes in ((0, 4, 1, 5), (2, 6, 3, 7))
    ]
    return [e.pick(*pair, lanes) for pair in halves for lanes in ((0, 1, 4, 5), (2, 3, 6, 7))]


@routine()
def join_partials(
    e: Any, partials: Any, partial_states: Any, head_dim: Any, totals: Any, states: Any, count: Any
) -> None:
    """Let up to four vectors' sums of a segment, computed elsewhere, join their totals as if computed here."""
    places = _clamped(e, count)
    rows, added = (
        [e.load(e.add(first, e.times(place, STATE_BYTES)), _FLOATS4) for place in places]
        for first in (states, partial_states)
    )
    top, sums, _, _ = _transposed(e, added)
    joined = _join_states(e, rows, top, sums)
    for row, place in reversed(list(zip(joined, places, strict=True))):
        e.store(row, e.add(states, e.times(place, STATE_BYTES)))
    with e.loop(count) as vector:
        inside = e.builder.mul(vector.index, head_dim)
        state = e.add(states, e.times(vector.index, STATE_BYTES))
        with e.loop(e.builder.sdiv(head_dim, e.integer(LANES))) as loop:
            offset = e.times(e.add(inside, e.times(loop.index, LANES)), 4)
            join_total(e, e.add(totals, offset), e.load(e.add(partials, offset)), state)


def _clamped(e: Any, count: Any) -> Sequence[Any]:
    """0 .. 3, but none beyond the last of `count`."""
    last = e.builder.sub(count, e.integer(1))
    numbers = [e.integer(number) for number in range(WEIGHED_AT_ONCE)]
    return [e.builder.select(e.builder.icmp_signed("<", last, own), last, own) for own in numbers]
