"""How a row of f32 becomes codes: group by group, and eight groups together where all have 8 bits.

Most of the work of one group is to find the largest of 32 numbers and the sum of 32 codes. Eight groups find
theirs together, by transposing while they reduce. Both ways write the same bits. A NaN or infinity anywhere
in a group makes its scale NaN, so that broken numbers reach the logits and fail their sequence instead of
turning into plausible integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import (
    BYTES,
    F32,
    FLOATS,
    I8,
    I32,
    INTS,
    INTS8,
    LANES,
    LEVEL,
    SHORTS,
    routine,
)
from headrace.backends.cpu.fast.intrinsics_reductions import (
    by_four,
    larger_bits,
    largest_of_eight,
    runs,
    sum_int,
)
from headrace.backends.cpu.fast.kernels_coding import (
    BRAIN,
    BRAIN_IS_FLOAT,
    CODES,
    EXCESS,
    EXCESS_FIRST,
    EXCESS_LAST,
    FLOAT_BITS,
    GROUP,
    PLAN_BYTES,
    PLAN_FACTORS,
    PLAN_SHARES,
    PLAN_WIDE,
    RECORD_SCALE,
    RECORD_SUM,
    RUN_BYTES,
    WIDE_IS_SHORT,
    group_bytes,
    is_wide,
    low_codes_behind,
)
from headrace.backends.cpu.fast.kernels_tiles import FORMS_WITH_ROOM

_ROW = 4 * LANES
_HIGHEST_WIDE, _HIGHEST_NARROW = 127 * 256.0, 127.0
"""The largest code; of a wide one the high byte must fit int8."""
_LEAST = 1e-30
"""A group's largest number counts as no less."""
_TOGETHER = 8
"""Groups whose largest numbers and sums are found together: of a row, or of ROWS_TOGETHER rows."""
GATED_ROW = 2 * 4 * GROUP
"""Bytes from row to row of what quantize_rows reads."""
_FLOATS8 = ir.VectorType(F32, _TOGETHER)


@routine()
def quantize_row(e: Any, x: Any, groups: Any, coding: Any, plan: Any, out: Any) -> None:
    """Write `groups` x 32 numbers in a coding of kernels_coding; `out` is a coded_row.

    plan: what is read of it for CODES is said there.
    """
    is_coded = e.builder.icmp_signed("==", coding, e.integer(CODES))
    with e.builder.if_else(is_coded) as (codes, brains):
        with codes:
            at = {"x": x, "plan": plan, "out": out}
            _write_all(e, at, _OF_A_ROW, groups, low_codes_behind(e, groups))
        with brains:
            _write_brains(e, x, groups, out)


@routine()
def quantize_rows(
    e: Any, x: Any, rows: Any, group: Any, groups: Any, coding: Any, plan: Any, out: Any
) -> None:
    """The same for group `group` of `groups`, of up to ROWS_TOGETHER rows that are GATED_ROW apart.

    plan, out: of group 0 of all; of the first row's.
    """
    is_coded = e.builder.icmp_signed("==", coding, e.integer(CODES))
    with e.builder.if_else(is_coded) as (codes, brains):
        with codes:
            at = {"x": x, "plan": e.add(plan, e.times(group, PLAN_BYTES))}
            at["out"] = e.add(out, e.times(group, group_bytes(CODES)))
            _write_all(e, at, _OF_A_GROUP, rows, low_codes_behind(e, groups))
        with brains:
            target = e.add(out, e.times(group, group_bytes(BRAIN)))
            with e.loop(rows) as loop:
                source = e.add(x, e.times(loop.index, GATED_ROW))
                run = e.add(target, e.times(loop.index, RUN_BYTES[BRAIN]))
                _write_brains(e, source, e.integer(1), run)


def _write_brains(e: Any, x: Any, groups: Any, out: Any) -> None:
    with e.loop(e.times(groups, GROUP // LANES)) as loop:
        value = e.load(e.add(x, e.times(loop.index, _ROW)))
        value = value if BRAIN_IS_FLOAT else e.narrow(value)
        half = e.builder.and_(loop.index, e.integer(1))
        run = e.add(out, e.times(e.builder.sub(loop.index, half), group_bytes(BRAIN) // 2))
        e.store(value, e.add(run, e.times(half, RUN_BYTES[BRAIN] // 2)))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Bytes from one group to the next, of those that are coded one after the other."""

    x: int
    plan: int
    out: int

    def places(self, e: Any, at: dict[str, Any], number: Any) -> dict[str, Any]:
        return {
            name: e.add(at[name], e.times(number, step))
            for name, step in (("x", self.x), ("plan", self.plan), ("out", self.out))
        }


_OF_A_ROW = _Steps(2 * _ROW, PLAN_BYTES, group_bytes(CODES))
_OF_A_GROUP = _Steps(GATED_ROW, 0, RUN_BYTES[CODES])


def _write_all(e: Any, at: dict[str, Any], steps: _Steps, count: Any, behind: Any) -> None:
    """Write `count` groups, _TOGETHER at a time where none of those is wide."""

    def one_by_one(first: Any, number: Any) -> None:
        with e.loop(number) as loop:
            _write_group(e, steps.places(e, at, e.add(first, loop.index)), behind)

    if LEVEL != capability.AVX512_VNNI:
        one_by_one(e.integer(0), count)
        return
    together = e.builder.sdiv(count, e.integer(_TOGETHER))
    with e.loop(together) as loop:
        first = e.times(loop.index, _TOGETHER)
        here = steps.places(e, at, first)
        with e.builder.if_else(_is_any_wide(e, here["plan"], steps)) as (some_wide, all_narrow):
            with some_wide:
                one_by_one(first, e.integer(_TOGETHER))
            with all_narrow:
                _write_groups(e, here, steps)
    done = e.times(together, _TOGETHER)
    one_by_one(done, e.builder.sub(count, done))


def _is_any_wide(e: Any, plan: Any, steps: _Steps) -> Any:
    """Whether one of _TOGETHER groups is wide, as an i1."""
    found = e.load(plan, I8, PLAN_WIDE)
    for number in range(1, _TOGETHER if steps.plan else 1):
        found = e.builder.or_(found, e.load(plan, I8, PLAN_WIDE + number * steps.plan))
    return e.builder.icmp_signed("!=", found, I8(0))


def _numbers(e: Any, at: dict[str, Any], steps: _Steps = _OF_A_ROW, number: int = 0) -> list[Any]:
    """The 32 numbers of a group, loud ones made smaller."""
    values = []
    for half in (0, _ROW):
        value = e.load(at["x"], FLOATS, steps.x * number + half)
        if FORMS_WITH_ROOM:
            share = e.load(at["plan"], FLOATS, PLAN_SHARES + steps.plan * number + half)
            value = e.builder.fmul(value, share)
        values.append(value)
    return values


# --- one group ------------------------------------------------------------------


def _write_group(e: Any, at: dict[str, Any], behind: Any) -> None:
    """Write the codes and the record of one group. behind: how far its low bytes are behind the high ones."""
    builder, values = e.builder, _numbers(e, at)
    bits = [e.magnitude_bits(value) for value in values]
    is_less = builder.icmp_signed("<", bits[0], bits[1])
    most = e.largest_magnitude(builder.select(is_less, bits[1], bits[0]))
    is_wide_here = is_wide(e, at["plan"])
    highest = builder.select(is_wide_here, F32(_HIGHEST_WIDE), F32(_HIGHEST_NARROW))
    inverse = e.broadcast(builder.fdiv(highest, most))
    share = builder.select(is_wide_here, F32(1 / _HIGHEST_WIDE), F32(1 / _HIGHEST_NARROW))
    is_finite = builder.fcmp_ordered("<", most, F32(np.inf))
    scale = builder.select(is_finite, builder.fmul(most, share), F32(np.nan))
    codes = [e.to_int(builder.fmul(value, inverse)) for value in values]
    slots = [e.variable(I32(0)) for _ in codes]
    with builder.if_else(is_wide_here) as (wide_here, narrow_here):
        with wide_here:
            targets = at["out"], e.add(at["out"], behind)
            for half, code in enumerate(codes):
                e.set(slots[half], e.sum_int_lanes(_store_wide(e, code, targets, half)))
        with narrow_here:
            for slot, total in zip(slots, _store_narrow(e, codes, at), strict=True):
                e.set(slot, total)
    sums = [e.get(slot) for slot in slots]
    whole = builder.add(*sums)
    e.store(scale, at["out"], RECORD_SCALE)
    e.store(builder.sitofp(whole, F32), at["out"], RECORD_SUM)
    begin = builder.select(is_wide_here, I32(0), I32(FLOAT_BITS))
    for place, total in ((EXCESS, whole), (EXCESS_FIRST, sums[0]), (EXCESS_LAST, sums[1])):
        e.store(builder.sub(begin, builder.shl(total, I32(7))), at["out"], place)


def _store_narrow(e: Any, codes: list[Any], at: dict[str, Any]) -> list[Any]:
    """Store 32 codes as bytes; return the sums of the first and the last 16, times the bytes of the plan."""
    parts = [e.builder.trunc(code, BYTES) for code in codes]
    for half, part in enumerate(parts):
        e.store(part, at["out"], LANES * half)
    if not FORMS_WITH_ROOM:
        return [e.sum_int_lanes(code) for code in codes]
    factors = [e.load(at["plan"], BYTES, PLAN_FACTORS + LANES * half) for half in range(2)]
    return [e.dot_few(*pair) for pair in zip(factors, parts, strict=True)]


def _store_wide(e: Any, code: Any, targets: tuple[Any, Any], half: int) -> Any:
    """Store 16 codes as high and low bytes, or as they are where WIDE_IS_SHORT; return what those say."""
    builder = e.builder
    if WIDE_IS_SHORT:
        order = [4 * quad + place for quad in range(LANES // 4) for place in (0, 2, 1, 3)]
        short = builder.trunc(code, SHORTS)
        short = builder.shuffle_vector(short, short, ir.Constant(INTS, order))
        e.store(short, targets[0], 2 * LANES * half)
        return code
    high, low = e.split_bytes(code)
    for target, part in zip(targets, (high, low), strict=True):
        e.store(builder.trunc(part, BYTES), target, LANES * half)
    return builder.add(builder.shl(high, e.fill(8, INTS)), low)


# --- eight groups ---------------------------------------------------------------


def _write_groups(e: Any, at: dict[str, Any], steps: _Steps) -> None:
    """Write the codes and the records of _TOGETHER narrow groups."""
    builder, groups = e.builder, range(_TOGETHER)
    bits = []
    for group in groups:
        pair = [e.magnitude_bits(value) for value in _numbers(e, at, steps, group)]
        bits.append(larger_bits(e, *pair))
    most = builder.bitcast(largest_of_eight(e, bits), _FLOATS8)
    is_less = builder.fcmp_ordered("<", most, e.fill(_LEAST, _FLOATS8))
    most = builder.select(is_less, e.fill(_LEAST, _FLOATS8), most)
    inverse = builder.fdiv(e.fill(_HIGHEST_NARROW, _FLOATS8), most)
    is_finite = builder.fcmp_ordered("<", most, e.fill(np.inf, _FLOATS8))
    scale = builder.fmul(most, e.fill(1 / _HIGHEST_NARROW, _FLOATS8))
    scale = builder.select(is_finite, scale, e.fill(np.nan, _FLOATS8))
    totals = []
    for group in range(_TOGETHER // 2):
        codes = []
        for other in (group, group + _TOGETHER // 2):
            factor = builder.shuffle_vector(inverse, inverse, ir.Constant(INTS, [other] * LANES))
            values = _numbers(e, at, steps, other)
            codes += [e.to_int(builder.fmul(value, factor)) for value in values]
        totals.append(_store_two(e, e.join_bytes(codes), at, steps, group))
    _store_records(e, scale, _sums(e, totals), at["out"], steps.out)


def _sums(e: Any, totals: Sequence[Any]) -> tuple[Any, Any]:
    """Sums of the first and the last 16 of 8 groups, i32 [8] each.

    totals: of groups v and v + 4, their first and last halves in 128 bits each.
    """
    by_half = by_four(e, totals, sum_int)
    first, last = (e.pick(by_half, by_half, runs(f, f + 8, 4)) for f in (0, 4))
    return first, last


def _store_two(e: Any, codes: Any, at: dict[str, Any], steps: _Steps, group: int) -> Any:
    """Store the codes of groups `group` and `group` + 4; return sums of 4, times the bytes of the plan."""
    factors = []
    for number in range(2):
        other = group + number * _TOGETHER // 2
        half = e.pick(codes, codes, range(GROUP * number, GROUP * (number + 1)))
        e.store(half, at["out"], other * steps.out)
        kind = ir.VectorType(I8, GROUP)
        factors.append(e.load(at["plan"], kind, PLAN_FACTORS + other * steps.plan))
    return e.dot(e.fill(0, INTS), e.pick(*factors, range(2 * GROUP)), codes, is_signed=False)


def _store_records(e: Any, scale: Any, sums: tuple[Any, Any], out: Any, step: int) -> None:
    builder = e.builder
    whole = builder.add(*sums)
    total = builder.bitcast(builder.sitofp(whole, _FLOATS8), INTS8)
    begin, shift = e.fill(FLOAT_BITS, INTS8), e.fill(7, INTS8)
    excesses = [builder.sub(begin, builder.shl(value, shift)) for value in (whole, *sums)]
    fields = [builder.bitcast(scale, INTS8), total, *excesses]
    even, odd = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
    sides = [[e.pick(fields[f], fields[f + 1], lanes) for f in (0, 2)] for lanes in (even, odd)]
    for side, (a, b) in enumerate(sides):
        for later in range(2):
            run = e.pick(a, b, [lane + 2 * later for lane in (0, 1, 8, 9, 4, 5, 12, 13)])
            for number in range(2):
                group = 2 * side + later + number * _TOGETHER // 2
                record = e.pick(run, run, range(4 * number, 4 * number + 4))
                place = group * step
                e.store(record, out, place + RECORD_SCALE)
                last = builder.extract_element(fields[4], I32(group))
                e.store(last, out, place + EXCESS_LAST)
