"""The product of activations with a held weight: one routine for every form and number of rows.

A weight is tiles of 16 outputs x 32 inputs, those of the same outputs one after the other along the
inputs. Lane i of a vector is output i; a 32-bit lane of codes holds 4 consecutive inputs, so one
broadcast of 4 activation bytes meets 16 outputs. Rows are taken 8 at a time: codes are unpacked once.

Activations come in one of two codings. CODES, for weights of whole numbers: whole numbers too, by group of
32 inputs. Those of a wide group have 15 bits and are kept as two int8 (256 * high + low), or as int16 with
AVX2; those of a narrow one have 8, once loud inputs are made smaller. A plan says what each group is (see
coding_plan): 32 bytes, powers of two, that inputs are divided by before they are coded and their weights' codes
multiplied by in turn, and bytes that say whether it is wide and whether one of those is not 1.
Behind the codes come records, one per group: scale f32, scale * sum f32 (of codes times those bytes), and -128
times the sum of the codes, of the first 16 and of the last 16 (i32).

BRAIN, for weights of bf16: bf16 too, or f32 where the CPU has no products of bf16.
docs/performance.md has what each costs and what was tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import (
    DOT_SHIFTS_SIGNED,
    F32,
    HAS_BRAIN_DOT,
    I8,
    I32,
    I64,
    LANES,
    LEVEL,
    SHORTS16,
    routine,
)

NIBBLES = 0
"""256 bytes: byte j of a 64-byte run holds inputs j % 4 of two quads; 16 scales f16, 16 minima f16."""
BYTES_SIGNED = 1
"""512 bytes of w + 128; 16 scales f16."""
BYTES_WITH_MINIMUM = 2
"""512 bytes of 0 .. 31; 16 scales f16, 16 minima f16."""
BYTES_IN_HALVES = 3
"""512 bytes of w + 128; 16 scales f16 for the first 16 inputs, 16 for the last."""
PLAIN = 4
"""1,024 bytes: 16 runs of 16 pairs of bf16, two consecutive inputs of an output in a pair."""

TILE_BYTES = (320, 544, 576, 576, 1024)
GROUP = 32
FORMS_WITH_ROOM = (NIBBLES, BYTES_WITH_MINIMUM) if LEVEL == capability.AVX512_VNNI else ()
"""Those whose codes can be doubled three times and are still bytes; with AVX2 their sums would not fit then."""
PLAN_FACTORS, PLAN_WIDE, PLAN_DOUBLES, PLAN_BYTES = 0, 32, 33, 64
CODES, BRAIN = range(2)
"""How activations are coded."""
BRAIN_IS_FLOAT = not HAS_BRAIN_DOT
"""Whether BRAIN codes are kept as f32: where there are no products of bf16 nothing is won by rounding."""
CODE_BYTES = (64, 128 if BRAIN_IS_FLOAT else 64)
"""Of a group of activations in each coding. CODES: 32 high bytes, those of all groups; then as many low ones,
written where a group is wide."""
RECORD_BYTES = (20, 0)
EXCESS, EXCESS_FIRST, EXCESS_LAST = 8, 12, 16
"""Where a record has what dot products of codes w + 128 are too large by."""
ROWS_AT_ONCE = (8, 4, 2, 1)
OUTPUTS_AT_ONCE = 8 if LEVEL == capability.AVX2 else LANES
"""Outputs of a tile that are computed together: what a register holds."""
RESULTS, INTEGERS = (ir.VectorType(kind, OUTPUTS_AT_ONCE) for kind in (F32, I32))
WIDE_IS_SHORT = LEVEL == capability.AVX2
"""Whether wide codes are kept as int16, of inputs 0, 2, 1, 3 of each 4: AVX2 multiplies those as fast."""
ROWS_IN_FLIGHT = 8 if LEVEL == capability.AVX2 else 4
"""Rows whose integer sums are in registers together, beside the results of 8."""
PREFETCH_TILES = 8


def codes_at(e: Any, x: Any, groups: Any, group: Any) -> tuple[Any, Any]:
    """Where the codes of a group begin, and its low bytes, in a row of CODES at `x`."""
    if WIDE_IS_SHORT:
        here = e.add(x, e.times(group, CODE_BYTES[CODES]))
        return here, here
    high = e.add(x, e.times(group, GROUP))
    return high, e.add(high, e.times(groups, GROUP))


class _Totals:
    """A row's results, in a register where one holds all 16, else in memory."""

    def __init__(self, e: Any) -> None:
        self._e = e
        self._slot = cgutils.alloca_once(e.builder, RESULTS, size=LANES // OUTPUTS_AT_ONCE)

    def at(self, side: Any) -> Any:
        """Return where the results of outputs from `side` on are."""
        if OUTPUTS_AT_ONCE == LANES:
            return self._slot
        return self._e.builder.gep(
            self._slot, [self._e.builder.sdiv(side, self._e.integer(OUTPUTS_AT_ONCE))]
        )


def _codes(e: Any, tile: Any, form: int, is_wide: bool) -> list[Any]:
    """Return the inputs of a tile's outputs: 8 vectors of 4 bytes a lane, 16 of 2 shorts if WIDE_IS_SHORT."""
    is_short, codes = is_wide and WIDE_IS_SHORT, []
    kind = SHORTS16 if is_short else INTEGERS
    shifts: tuple[int, ...]
    if form == NIBBLES:
        shifts, mask = ((0, 8, 4, 12), 15) if is_short else ((0, 4), 0x0F0F0F0F)
    else:
        shifts, mask = ((0, 8), 255) if is_short else ((0,), -1)
    for run in range(4 if form == NIBBLES else 8):
        packed = e.builder.bitcast(e.load(tile, INTEGERS, 64 * run), kind)
        for shift in shifts:
            code = e.builder.lshr(packed, e.fill(shift, kind))
            codes.append(e.builder.and_(code, e.fill(mask, kind)))
    return codes


def _doubled(e: Any, codes: Sequence[Any], plan: Any) -> list[Any]:
    """Return codes times their bytes of a plan; in every second group there are none to double."""
    slots = [e.variable(code) for code in codes]
    is_any = e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_DOUBLES), I8(0))
    with e.builder.if_then(is_any):
        for number, slot in enumerate(slots):
            factors = e.broadcast(e.load(plan, I32, PLAN_FACTORS + 4 * number))
            e.set(slot, e.times_powers(e.get(slot), factors))
    return [e.get(slot) for slot in slots]


def _kept_here(e: Any, x: Any) -> Any:
    """Return the address `x` such that what is read from it is read between here and the next store.

    Broadcast once for both sides, or early for a half to come, it would take more registers than AVX2 has.
    """
    return e.opaque(x) if OUTPUTS_AT_ONCE < LANES else x


def _sums(
    e: Any, form: int, is_wide: bool, codes: Sequence[Any], x: list[list[Any]], starts: list[Any]
) -> list[Any]:
    """Return each row's integer products with some codes, which meet the numbers from `x` on, high and low.

    `starts`: what each sum begins with. Rows advance together, code by code, so that no dot product waits for
    the one before it.
    """
    is_short = is_wide and WIDE_IS_SHORT
    is_summed_short = not is_wide and form == NIBBLES and LEVEL == capability.AVX2
    is_signed = form in (BYTES_SIGNED, BYTES_IN_HALVES)
    kind = SHORTS16 if is_summed_short else INTEGERS
    parts = 2 if is_wide and not is_short else 1
    totals = [[e.fill(0, kind) for _ in range(parts)] for _ in x]
    if is_signed and (DOT_SHIFTS_SIGNED or is_short):
        for total, start in zip(totals, starts, strict=True):
            total[-1] = e.broadcast(e.load(start, I32), OUTPUTS_AT_ONCE)
    for number, code in enumerate(codes):
        for total, row in zip(totals, x, strict=True):
            for part in range(parts):
                value = e.load(row[part], I32, 4 * number)
                value = e.broadcast(value, OUTPUTS_AT_ONCE)
                if is_short:
                    total[part] = e.dot_shorts(total[part], code, value)
                elif is_summed_short:  # 16 products of 15 and 127 fit
                    total[part] = e.builder.add(total[part], e.dot_bytes(code, value))
                else:
                    total[part] = e.dot(total[part], code, value, is_signed=is_signed)
    if is_summed_short:
        ones = e.fill(1, SHORTS16)
        return [e.dot_shorts(e.fill(0, INTEGERS), total[0], ones) for total in totals]
    if parts == 2:
        shift = e.fill(8, INTEGERS)
        return [e.builder.add(e.builder.shl(high, shift), low) for high, low in totals]
    return [total[0] for total in totals]


def _add_coded(
    e: Any, form: int, is_wide: bool, at: dict[str, Any], offsets: list[Any], totals: list[Any]
) -> None:
    """Add one tile to every row's total. `offsets`: of each row from the addresses `x` and `record`."""
    is_in_halves = form == BYTES_IN_HALVES
    scales = [e.load_halves(at["scales"], 0, OUTPUTS_AT_ONCE)]
    if form != BYTES_SIGNED:
        scales.append(e.load_halves(at["scales"], 32, OUTPUTS_AT_ONCE))
    codes = _codes(e, at["codes"], form, is_wide)
    if form in FORMS_WITH_ROOM and not is_wide:
        codes = _doubled(e, codes, at["plan"])
    size = len(codes) // (2 if is_in_halves else 1)
    for half, scale in enumerate(scales if is_in_halves else scales[:1]):
        base = [e.add(_kept_here(e, part), 4 * size * half) for part in at["x"]]
        x = [[e.add(part, offset) for part in base] for offset in offsets]
        place = (EXCESS_FIRST, EXCESS_LAST)[half] if is_in_halves else EXCESS
        records = [e.add(at["record"], offset) for offset in offsets]
        for first in range(0, len(totals), ROWS_IN_FLIGHT):
            some = slice(first, first + ROWS_IN_FLIGHT)
            starts = [e.add(record, place) for record in records[some]]
            of_half = codes[size * half : size * (half + 1)]
            sums = _sums(e, form, is_wide, of_half, x[some], starts)
            for total, record, part in zip(totals[some], records[some], sums, strict=True):
                x_scale = e.broadcast(e.load(record, F32, 0), OUTPUTS_AT_ONCE)
                factor = e.builder.fmul(scale, x_scale)
                result = e.fma(e.builder.sitofp(part, RESULTS), factor, e.get(total))
                if len(scales) == 2 and not is_in_halves:
                    x_sum = e.broadcast(e.load(record, F32, 4), OUTPUTS_AT_ONCE)
                    result = e.fma(scales[1], x_sum, result)
                e.set(total, result)


def _add_plain(e: Any, tile: Any, x: list[Any], totals: list[Any]) -> None:
    """Add one tile of bf16 to every row's total; `x` are addresses of bf16, or of f32 where BRAIN_IS_FLOAT."""
    results = [e.get(total) for total in totals]
    for pair in range(16):
        packed = e.load(tile, INTEGERS, 64 * pair)
        if not BRAIN_IS_FLOAT:
            for row, address in enumerate(x):
                value = e.broadcast(e.load(address, I32, 4 * pair))
                results[row] = e.dot_brain(results[row], packed, value)
            continue
        for place, weights in enumerate((e.widen_low(packed), e.widen_high(packed))):
            for row, address in enumerate(x):
                value = e.load(address, F32, 8 * pair + 4 * place)
                value = e.broadcast(value, OUTPUTS_AT_ONCE)
                results[row] = e.fma(weights, value, results[row])
    for total, result in zip(totals, results, strict=True):
        e.set(total, result)


def is_wide(e: Any, plan: Any) -> Any:
    """Whether the group of activations with this plan is wide, as an i1."""
    return e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_WIDE), I8(0))


@contextlib.contextmanager
def _sides(e: Any) -> Iterator[Any]:
    """The code for OUTPUTS_AT_ONCE of a tile's outputs, for each of the places it gives."""
    if OUTPUTS_AT_ONCE == LANES:
        yield e.integer(0)
        return
    with e.loop(e.integer(LANES // OUTPUTS_AT_ONCE)) as loop:
        yield e.times(loop.index, OUTPUTS_AT_ONCE)


def _rows(e: Any, form: int, num_rows: int, at: dict[str, Any]) -> None:
    """Multiply `num_rows` rows, from the addresses `at` on, with one column of tiles."""
    coding = BRAIN if form == PLAIN else CODES
    offsets = [e.times(at["x_stride"], row) for row in range(num_rows)]
    slots = [_Totals(e) for _ in range(num_rows)]
    with _sides(e) as side:
        slot = e.variable(e.fill(0.0, RESULTS))
        is_biased = e.builder.icmp_signed("!=", at["bias"], e.integer(0))
        with e.builder.if_then(is_biased):
            e.set(slot, e.load(e.add(at["bias"], e.times(side, 4)), RESULTS))
        for row in range(num_rows):
            e.set(slots[row].at(side), e.get(slot))
    with e.loop(at["groups"]) as loop:
        tile = e.add(at["tiles"], e.times(loop.index, TILE_BYTES[form]))
        if num_rows == ROWS_AT_ONCE[0]:
            _fetch_share(e, at)
        else:
            _fetch_tile(e, form, at, loop.index)
        here = {"x": codes_at(e, at["x"], at["groups"], loop.index)}
        record = e.add(at["x"], e.times(at["groups"], CODE_BYTES[coding]))
        here["record"] = e.add(record, e.times(loop.index, RECORD_BYTES[coding]))
        with _sides(e) as side:
            here["codes"] = e.add(tile, e.times(side, 4))
            totals = [slot.at(side) for slot in slots]
            if form == PLAIN:
                first = e.add(at["x"], e.times(loop.index, CODE_BYTES[BRAIN]))
                x = [e.add(_kept_here(e, first), offset) for offset in offsets]
                _add_plain(e, here["codes"], x, totals)
            else:
                end = 256 if form == NIBBLES else 512
                here["scales"] = e.add(tile, e.add(e.times(side, 2), end))
                here["plan"] = e.add(at["plan"], e.times(loop.index, PLAN_BYTES))
                with e.builder.if_else(is_wide(e, here["plan"])) as (wide, narrow):
                    for branch in (wide, narrow):
                        with branch:
                            _add_coded(e, form, branch is wide, here, offsets, totals)
    for row in range(num_rows):
        with _sides(e) as side:
            out = e.add(at["out"], e.add(e.times(at["out_stride"], row), e.times(side, 4)))
            e.store(e.get(slots[row].at(side)), out)


def _fetch_tile(e: Any, form: int, at: dict[str, Any], group: Any) -> None:
    """Ask for what comes a few tiles later, in this column or the next one."""
    later = e.add(group, PREFETCH_TILES)
    is_here = e.builder.icmp_signed("<", later, at["groups"])
    column_bytes = e.times(at["groups"], TILE_BYTES[form])
    elsewhere = e.builder.sub(at["next_tiles"], column_bytes)
    tile = e.add(
        e.builder.select(is_here, at["tiles"], elsewhere), e.times(later, TILE_BYTES[form])
    )
    for line in range(0, TILE_BYTES[form], 64):
        e.prefetch(tile, line)


def _fetch_share(e: Any, at: dict[str, Any]) -> None:
    """Ask for what `_fetching` says."""
    fetched = e.get(at["fetched"])
    with e.loop(at["fetched_lines"]) as lines:
        e.prefetch(e.add(fetched, e.times(lines.index, 64)))
    e.set(at["fetched"], e.add(fetched, e.times(at["fetched_lines"], 64)))


def _fetching(e: Any, form: int, at: dict[str, Any], rows: Any) -> dict[str, Any]:
    """What to ask for beside each tile of 8 rows: from where on, and how many lines.

    It is the next column's, a share in each pass over this one: in one pass alone they would be asked for
    faster than memory gives them.
    """
    at_once, lines = ROWS_AT_ONCE[0], -(-TILE_BYTES[form] // 64)
    passes = e.builder.sdiv(rows, e.integer(at_once))
    passes = e.call("llvm.smax.i64", I64, passes, e.integer(1))
    lines = e.builder.sdiv(e.add(passes, lines - 1), passes)
    return {"fetched": e.variable(at["next_tiles"]), "fetched_lines": lines}


def _product(e: Any, form: int, at: dict[str, Any], rows: Any) -> None:
    at = {**at, **_fetching(e, form, at, rows)}
    x, out, left = e.variable(at["x"]), e.variable(at["out"]), e.variable(rows)
    for size in ROWS_AT_ONCE:
        count = e.builder.sdiv(e.get(left), e.integer(size))
        with e.loop(count):
            here = {**at, "x": e.get(x), "out": e.get(out)}
            _rows(e, form, size, here)
            e.set(x, e.add(here["x"], e.times(at["x_stride"], size)))
            e.set(out, e.add(here["out"], e.times(at["out_stride"], size)))
        e.set(left, e.builder.srem(e.get(left), e.integer(size)))


@routine()
def product(
    e: Any, form: Any, plan: Any, tiles: Any, next_tiles: Any, groups: Any, x: Any, x_stride: Any, out: Any,
    out_stride: Any, bias: Any, rows: Any,
) -> None:  # fmt: skip
    """out[row, 0:16] = x[row] times one column of tiles (+ bias[0:16] where its address is not 0).

    plan: how each group of activations is coded; nothing is read there for PLAIN. next_tiles: the column that
    comes next, which is asked for meanwhile.
    """
    at = {
        "plan": plan, "tiles": tiles, "next_tiles": next_tiles, "groups": groups, "x": x,
        "x_stride": x_stride, "out": out, "out_stride": out_stride, "bias": bias,
    }  # fmt: skip
    end = e.builder.append_basic_block("product.end")
    choice = e.builder.switch(form, end)
    for known in range(len(TILE_BYTES)):
        block = e.builder.append_basic_block(f"product.form{known}")
        choice.add_case(e.integer(known), block)
        e.builder.position_at_end(block)
        _product(e, known, at, rows)
        e.builder.branch(end)
    e.builder.position_at_end(end)
