"""The product of activations with a held weight: one routine for every form and number of rows.

A weight is tiles of 16 outputs x 32 inputs, those of the same outputs one after the other along the
inputs. Lane i of a vector is output i; a 32-bit lane of codes holds 4 consecutive inputs, so one
broadcast of 4 activation bytes meets 16 outputs. Rows are taken 8 at a time: codes are unpacked once for those.

What activations are coded as, which they are for each form, is in kernels_coding.
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
    HAS_TWO_PORTS,
    I32,
    I64,
    LANES,
    LEVEL,
    SHORTS16,
    routine,
)
from headrace.backends.cpu.fast.kernels_coding import (
    BRAIN,
    BRAIN_IS_FLOAT,
    CODES,
    EXCESS,
    EXCESS_FIRST,
    EXCESS_LAST,
    PLAN_BYTES,
    PLAN_FACTORS,
    RECORD_SCALE,
    RECORD_SUM,
    RUN_BYTES,
    WIDE_IS_SHORT,
    has_doubles,
    is_wide,
    low_codes_behind,
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
FORMS_WITH_ROOM = (NIBBLES, BYTES_WITH_MINIMUM) if LEVEL == capability.AVX512_VNNI else ()
"""Those whose codes can be doubled three times and are still bytes; with AVX2 their sums would not fit then."""
ROWS_AT_ONCE = (8, 4, 2, 1)
OUTPUTS_AT_ONCE = 8 if LEVEL == capability.AVX2 else LANES
"""Outputs of a tile that are computed together: what a register holds."""
RESULTS, INTEGERS = (ir.VectorType(kind, OUTPUTS_AT_ONCE) for kind in (F32, I32))
PREFETCH_TILES = 8
MANY_ROWS = 24
"""From here on a column's nibbles are unpacked once for all rows, not once for every 8, if HAS_TWO_PORTS."""
UNPACKED_GROUPS = 24
"""Of a column at a time, so that they stay in the first-level cache."""
UNPACKED_BYTES = 512 + 2 * 4 * LANES
"""8 vectors of codes, scales and minima as f32."""


def rows_in_flight(parts: int) -> int:
    """Rows whose integer sums, `parts` each, are in registers together, beside the results of 8."""
    return 8 if LEVEL == capability.AVX2 or (HAS_TWO_PORTS and parts == 1) else 4


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
    with e.builder.if_then(has_doubles(e, plan)):
        for number, slot in enumerate(slots):
            factors = e.broadcast(e.load(plan, I32, PLAN_FACTORS + 4 * number))
            e.set(slot, e.times_powers(e.get(slot), factors))
    return [e.get(slot) for slot in slots]


class _Packed:
    """A column of tiles as they are held, for `_rows`."""

    def __init__(self, e: Any, form: int, at: dict[str, Any]) -> None:
        self._e, self._form, self._at = e, form, at
        self.first, self.count = e.integer(0), at["groups"]

    def start(self, side: Any, out: Any) -> Any:
        """Return what the results of a row begin with, which are to be at `out`."""
        e = self._e
        slot = e.variable(e.fill(0.0, RESULTS))
        is_biased = e.builder.icmp_signed("!=", self._at["bias"], e.integer(0))
        with e.builder.if_then(is_biased):
            e.set(slot, e.load(e.add(self._at["bias"], e.times(side, 4)), RESULTS))
        return e.get(slot)

    def _tile(self, group: Any) -> Any:
        return self._e.add(self._at["tiles"], self._e.times(group, TILE_BYTES[self._form]))

    def scales(self, group: Any, side: Any) -> list[Any]:
        """Return a tile's scales, and the second ones or its minima where there are some."""
        e, end = self._e, 256 if self._form == NIBBLES else 512
        place = e.add(self._tile(group), e.add(e.times(side, 2), end))
        count = 1 if self._form == BYTES_SIGNED else 2
        return [e.load_halves(place, 32 * number, OUTPUTS_AT_ONCE) for number in range(count)]

    def codes(self, group: Any, side: Any, plan: Any, is_wide: bool) -> list[Any]:
        e = self._e
        tile = e.add(self._tile(group), e.times(side, 4))
        codes = _codes(e, tile, self._form, is_wide)
        return _doubled(e, codes, plan) if self._form in FORMS_WITH_ROOM and not is_wide else codes


class _Unpacked:
    """Tiles of NIBBLES from group `first` on as bytes, doubled, their scales and minima as f32."""

    def __init__(self, e: Any, at: dict[str, Any], space: Any, first: Any, count: Any) -> None:
        self._e, self._space = e, space
        self.first, self.count = first, count
        self._held = held = _Packed(e, NIBBLES, at)
        with e.loop(count) as loop:
            group = e.add(first, loop.index)
            target = self._target(group)
            plan = e.add(at["plan"], e.times(group, PLAN_BYTES))
            values = held.codes(group, e.integer(0), plan, is_wide=False)
            for place, value in enumerate(values + held.scales(group, e.integer(0))):
                e.store(value, target, 64 * place)

    def _target(self, group: Any) -> Any:
        inside = self._e.builder.sub(group, self.first)
        return self._e.add(self._space, self._e.times(inside, UNPACKED_BYTES))

    def start(self, side: Any, out: Any) -> Any:
        """Return what a row's results were behind the groups before."""
        slot = self._e.variable(self._held.start(side, out))
        is_later = self._e.builder.icmp_signed("!=", self.first, self._e.integer(0))
        with self._e.builder.if_then(is_later):
            self._e.set(slot, self._e.load(out))
        return self._e.get(slot)

    def scales(self, group: Any, side: Any) -> list[Any]:
        return [self._e.load(self._target(group), offset=512 + 64 * place) for place in range(2)]

    def codes(self, group: Any, side: Any, plan: Any, is_wide: bool) -> list[Any]:
        target = self._target(group)
        return [self._e.load(target, INTEGERS, 64 * place) for place in range(8)]


def _runs(e: Any, first: Any, offsets: list[Any]) -> list[Any]:
    """Return where rows have their run of codes, `offsets` from `first`.

    AVX2: such that what is read there is read between here and the next store; broadcast once for both sides,
    or early for a half to come, it would take more registers than there are. Two ports: each in a register of
    its own, because an address of two takes a place of its own beside the product that reads there.
    """
    if OUTPUTS_AT_ONCE < LANES:
        first = e.opaque(first)
    return [e.add(first, offset) for offset in offsets]


def _sums(
    e: Any, form: int, is_wide: bool, codes: Sequence[Any], x: list[Any], low: Any, excess: int
) -> list[Any]:
    """Return each row's integer products with some codes, which meet the numbers from `x` on.

    low: how far low bytes are behind high ones. excess: what a sum of codes w + 128 begins with, behind `x`.
    Rows advance together, code by code, so that no dot product waits for the one before it.
    """
    is_short = is_wide and WIDE_IS_SHORT
    is_summed_short = not is_wide and form == NIBBLES and LEVEL == capability.AVX2
    is_signed = form in (BYTES_SIGNED, BYTES_IN_HALVES)
    kind = SHORTS16 if is_summed_short else INTEGERS
    parts = 2 if is_wide and not is_short else 1
    totals = [[e.fill(0, kind) for _ in range(parts)] for _ in x]
    if is_signed and (DOT_SHIFTS_SIGNED or is_short):
        for total, run in zip(totals, x, strict=True):
            total[-1] = e.broadcast(e.load(run, I32, excess), OUTPUTS_AT_ONCE)
    places = [(run, e.add(run, low))[:parts] for run in x]
    for number, code in enumerate(codes):
        for total, row in zip(totals, places, strict=True):
            for part in range(parts):
                if HAS_TWO_PORTS:
                    total[part] = e.dot_here(total[part], code, row[part], 4 * number)
                    continue
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
    """Add one tile, `codes` and `scales` of `at`, to every row's total.

    run: where row 0 has the group's codes. low: how far its low bytes are behind. offsets: of each row.
    """
    is_in_halves = form == BYTES_IN_HALVES
    codes, scales = at["codes"], at["scales"]
    size = len(codes) // (2 if is_in_halves else 1)
    for half, scale in enumerate(scales if is_in_halves else scales[:1]):
        runs = _runs(e, at["run"], offsets)
        begin = 4 * size * half
        excess = (EXCESS_FIRST, EXCESS_LAST)[half] if is_in_halves else EXCESS
        at_once = rows_in_flight(2 if is_wide else 1)
        for first in range(0, len(totals), at_once):
            some = slice(first, first + at_once)
            of_half = codes[size * half : size * (half + 1)]
            x = [e.add(run, begin) for run in runs[some]]
            sums = _sums(e, form, is_wide, of_half, x, at["low"], excess - begin)
            for total, run, part in zip(totals[some], runs[some], sums, strict=True):
                x_scale = e.broadcast(e.load(run, F32, RECORD_SCALE), OUTPUTS_AT_ONCE)
                factor = e.builder.fmul(scale, x_scale)
                result = e.fma(e.builder.sitofp(part, RESULTS), factor, e.get(total))
                if len(scales) == 2 and not is_in_halves:
                    x_sum = e.broadcast(e.load(run, F32, RECORD_SUM), OUTPUTS_AT_ONCE)
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


@contextlib.contextmanager
def _sides(e: Any) -> Iterator[Any]:
    """The code for OUTPUTS_AT_ONCE of a tile's outputs, for each of the places it gives."""
    if OUTPUTS_AT_ONCE == LANES:
        yield e.integer(0)
        return
    with e.loop(e.integer(LANES // OUTPUTS_AT_ONCE)) as loop:
        yield e.times(loop.index, OUTPUTS_AT_ONCE)


def _rows(e: Any, form: int, num_rows: int, at: dict[str, Any], tiles: _Packed | _Unpacked) -> None:
    """Multiply `num_rows` rows, from the addresses `at` on, with tiles of one column."""
    coding = BRAIN if form == PLAIN else CODES
    offsets = [e.times(at["x_stride"], row) for row in range(num_rows)]
    slots = [_Totals(e) for _ in range(num_rows)]

    def place(row: int, side: Any) -> Any:
        return e.add(at["out"], e.add(e.times(at["out_stride"], row), e.times(side, 4)))

    with _sides(e) as side:
        for row in range(num_rows):
            e.set(slots[row].at(side), tiles.start(side, place(row, side)))
    with e.loop(tiles.count) as loop:
        group = e.add(tiles.first, loop.index)
        if num_rows == ROWS_AT_ONCE[0]:
            _fetch_share(e, at)
        else:
            _fetch_tile(e, form, at, group)
        run = e.add(at["x"], e.times(group, RUN_BYTES[coding]))
        plan = e.add(at["plan"], e.times(group, PLAN_BYTES))
        with _sides(e) as side:
            totals = [slot.at(side) for slot in slots]
            if form == PLAIN:
                tile = e.add(at["tiles"], e.add(e.times(group, TILE_BYTES[form]), e.times(side, 4)))
                _add_plain(e, tile, _runs(e, run, offsets), totals)
            else:
                low = low_codes_behind(e, at["groups"], group)
                here = {"run": run, "low": low, "scales": tiles.scales(group, side)}
                with e.builder.if_else(is_wide(e, plan)) as (wide, narrow):
                    for branch in (wide, narrow):
                        with branch:
                            here["codes"] = tiles.codes(group, side, plan, branch is wide)
                            _add_coded(e, form, branch is wide, here, offsets, totals)
    for row in range(num_rows):
        with _sides(e) as side:
            e.store(e.get(slots[row].at(side)), place(row, side))


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
    e.prefetch(fetched)
    with e.loop(e.add(at["fetched_lines"], -1)) as more:
        e.prefetch(e.add(fetched, e.times(more.index, 64)), 64)
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


def _all_rows(e: Any, form: int, at: dict[str, Any], rows: Any, tiles: _Packed | _Unpacked) -> None:
    """Multiply `rows` rows with tiles of one column, as many at once as there are registers for."""
    x, out, left = e.variable(at["x"]), e.variable(at["out"]), e.variable(rows)
    for size in ROWS_AT_ONCE:
        count = e.builder.sdiv(e.get(left), e.integer(size))
        with e.loop(count):
            here = {**at, "x": e.get(x), "out": e.get(out)}
            _rows(e, form, size, here, tiles)
            e.set(x, e.add(here["x"], e.times(at["x_stride"], size)))
            e.set(out, e.add(here["out"], e.times(at["out_stride"], size)))
        e.set(left, e.builder.srem(e.get(left), e.integer(size)))


def _unpacked_product(e: Any, at: dict[str, Any], rows: Any) -> None:
    """All rows with a column of NIBBLES, some groups after the other; results wait where they are to be."""
    space = cgutils.alloca_once(e.builder, INTEGERS, size=UNPACKED_GROUPS * UNPACKED_BYTES // 64)
    most = e.integer(UNPACKED_GROUPS)
    parts = e.builder.sdiv(e.add(at["groups"], UNPACKED_GROUPS - 1), most)
    with e.loop(parts) as loop:
        first = e.times(loop.index, UNPACKED_GROUPS)
        count = e.call("llvm.smin.i64", I64, e.builder.sub(at["groups"], first), most)
        tiles = _Unpacked(e, at, e.builder.ptrtoint(space, I64), first, count)
        _all_rows(e, NIBBLES, at, rows, tiles)


def _product(e: Any, form: int, at: dict[str, Any], rows: Any) -> None:
    at = {**at, **_fetching(e, form, at, rows)}
    if form != NIBBLES or not HAS_TWO_PORTS:
        _all_rows(e, form, at, rows, _Packed(e, form, at))
        return
    is_many = e.builder.icmp_signed(">=", rows, e.integer(MANY_ROWS))
    with e.builder.if_else(is_many) as (many, few):
        with many:
            _unpacked_product(e, at, rows)
        with few:
            _all_rows(e, form, at, rows, _Packed(e, form, at))


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
