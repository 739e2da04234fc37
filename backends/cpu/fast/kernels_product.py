"""The product of activations with a held weight: one routine for every form and number of rows.

Weights are tiles (kernels_tiles), activations are coded (kernels_coding). A 32-bit lane of a weight's codes
holds 4 consecutive inputs of an output, so one broadcast of 4 activation bytes meets 16 outputs. Rows are taken
8 at a time: codes are unpacked once for those, or for all rows where arithmetic has two ports only.
docs/performance.md has what each costs and what was tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

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
    FLOAT_BITS,
    PLAN_BYTES,
    RECORD_SCALE,
    RECORD_SUM,
    ROWS_TOGETHER,
    RUN_BYTES,
    WIDE_IS_SHORT,
    group_bytes,
    is_wide,
    low_codes_behind,
)
from headrace.backends.cpu.fast.kernels_tiles import (
    BYTES_IN_HALVES,
    BYTES_SIGNED,
    INTEGERS,
    NIBBLES,
    OUTPUTS_AT_ONCE,
    PLAIN,
    RESULTS,
    TILE_BYTES,
    UNPACKED_BYTES,
    UNPACKED_GROUPS,
    Packed,
    Unpacked,
)

ROWS_AT_ONCE = (ROWS_TOGETHER, 4, 2, 1)
PREFETCH_TILES = 8
MANY_ROWS = 24
"""From here on a column's nibbles are unpacked once for all rows, not once for every 8, if HAS_TWO_PORTS."""


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


def _run(e: Any, run: Any) -> Any:
    """Return the address of a run.

    AVX2: such that what is read there is read between here and the next store; broadcast once for both sides,
    or early for a half to come, it would take more registers than there are.
    """
    return e.opaque(run) if OUTPUTS_AT_ONCE < LANES else run


def _sums(
    e: Any,
    form: int,
    is_wide: bool,
    codes: Sequence[Any],
    run: Any,
    low: Any,
    x: list[int],
    excess: int,
) -> list[Any]:
    """Return each row's products with some codes, which meet the numbers `x` behind `run`, as f32.

    Those of a narrow group have FLOAT_BASE added. low: as `run`, for low bytes. excess: what a sum of codes
    w + 128 begins with, behind the numbers.
    Rows advance together, code by code, so that no dot product waits for the one before it.
    """
    is_short = is_wide and WIDE_IS_SHORT
    is_summed_short = not is_wide and form == NIBBLES and LEVEL == capability.AVX2
    is_signed = form in (BYTES_SIGNED, BYTES_IN_HALVES)
    kind = SHORTS16 if is_summed_short else INTEGERS
    parts = 2 if is_wide and not is_short else 1
    begin = 0 if is_wide else FLOAT_BITS
    totals = [[e.fill(0 if is_summed_short else begin, kind) for _ in range(parts)] for _ in x]
    if is_signed and (DOT_SHIFTS_SIGNED or is_short):
        for total, offset in zip(totals, x, strict=True):
            total[-1] = e.broadcast(e.load(run, I32, offset + excess), OUTPUTS_AT_ONCE)
    for number, code in enumerate(codes):
        for total, offset in zip(totals, x, strict=True):
            for part, address in enumerate((run, low)[:parts]):
                place = offset + 4 * number
                if HAS_TWO_PORTS:
                    total[part] = e.dot_here(total[part], code, address, place)
                    continue
                value = e.broadcast(e.load(address, I32, place), OUTPUTS_AT_ONCE)
                if is_short:
                    total[part] = e.dot_shorts(total[part], code, value)
                elif is_summed_short:  # 16 products of 15 and 127 fit
                    total[part] = e.builder.add(total[part], e.dot_bytes(code, value))
                else:
                    total[part] = e.dot(total[part], code, value, is_signed=is_signed)
    if is_summed_short:
        ones, base = e.fill(1, SHORTS16), e.fill(begin, INTEGERS)
        totals = [[e.dot_shorts(base, total[0], ones)] for total in totals]
    if not is_wide:
        return [e.builder.bitcast(total[0], RESULTS) for total in totals]
    if parts == 2:
        shift = e.fill(8, INTEGERS)
        totals = [[e.builder.add(e.builder.shl(high, shift), low)] for high, low in totals]
    return [e.builder.sitofp(total[0], RESULTS) for total in totals]


def _add_coded(
    e: Any, form: int, is_wide: bool, at: dict[str, Any], offsets: list[int], totals: list[Any]
) -> None:
    """Add one tile, `codes`, `scales` and `bases` of `at`, to every row's total.

    run: where row 0 has the group's codes. behind: how far its low bytes are behind. offsets: of each row.
    """
    is_in_halves = form == BYTES_IN_HALVES
    codes, scales = at["codes"], at["scales"]
    size = len(codes) // (2 if is_in_halves else 1)
    minimum = None if len(scales) == 1 or is_in_halves else scales[1]
    for half, (scale, base) in enumerate(zip(scales, at["bases"], strict=False)):
        run, begin = _run(e, at["run"]), 4 * size * half
        low = e.add(run, at["behind"])
        excess = (EXCESS_FIRST, EXCESS_LAST)[half] if is_in_halves else EXCESS
        at_once = rows_in_flight(2 if is_wide else 1)
        for first in range(0, len(totals), at_once):
            some = slice(first, first + at_once)
            of_half = codes[size * half : size * (half + 1)]
            x = [offset + begin for offset in offsets[some]]
            sums = _sums(e, form, is_wide, of_half, run, low, x, excess - begin)
            for total, offset, part in zip(totals[some], offsets[some], sums, strict=True):
                result = e.builder.fmul(part, scale) if is_wide else e.fma(part, scale, base)
                if minimum:
                    x_sum = e.broadcast(e.load(run, F32, offset + RECORD_SUM), OUTPUTS_AT_ONCE)
                    result = e.fma(minimum, x_sum, result)
                x_scale = e.broadcast(e.load(run, F32, offset + RECORD_SCALE), OUTPUTS_AT_ONCE)
                e.set(total, e.fma(result, x_scale, e.get(total)))


def _add_plain(e: Any, tile: Any, run: Any, offsets: list[int], totals: list[Any]) -> None:
    """Add one tile of bf16 to every row's total; `offsets` behind `run` are bf16, f32 where BRAIN_IS_FLOAT."""
    results = [e.get(total) for total in totals]
    for pair in range(16):
        packed = e.load(tile, INTEGERS, 64 * pair)
        if not BRAIN_IS_FLOAT:
            for row, offset in enumerate(offsets):
                value = e.broadcast(e.load(run, I32, offset + 4 * pair))
                results[row] = e.dot_brain(results[row], packed, value)
            continue
        for place, weights in enumerate((e.widen_low(packed), e.widen_high(packed))):
            for row, offset in enumerate(offsets):
                value = e.load(run, F32, offset + 8 * pair + 4 * place)
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


def _rows(e: Any, form: int, num_rows: int, at: dict[str, Any], tiles: Packed | Unpacked) -> None:
    """Multiply `num_rows` rows, from the addresses `at` on, with tiles of one column."""
    coding = BRAIN if form == PLAIN else CODES
    offsets = [RUN_BYTES[coding] * row for row in range(num_rows)]
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
        run = e.add(at["x"], e.times(group, group_bytes(coding)))
        plan = e.add(at["plan"], e.times(group, PLAN_BYTES))
        with _sides(e) as side:
            totals = [slot.at(side) for slot in slots]
            if form == PLAIN:
                tile = e.add(at["tiles"], e.add(e.times(group, TILE_BYTES[form]), e.times(side, 4)))
                _add_plain(e, tile, _run(e, run), offsets, totals)
            else:
                behind = low_codes_behind(e, at["groups"])
                here = {"run": run, "behind": behind, **tiles.scales(group, side)}
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
    with e.builder.if_then(e.builder.icmp_signed("<", fetched, at["fetched_end"])):
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
    end = e.add(at["next_tiles"], e.times(at["groups"], TILE_BYTES[form]))
    return {"fetched": e.variable(at["next_tiles"]), "fetched_end": end, "fetched_lines": lines}


def _all_rows(e: Any, form: int, at: dict[str, Any], rows: Any, tiles: Packed | Unpacked) -> None:
    """Multiply `rows` rows with tiles of one column, as many at once as there are registers for."""
    coding = BRAIN if form == PLAIN else CODES
    x, out, left = e.variable(at["x"]), e.variable(at["out"]), e.variable(rows)
    for size in ROWS_AT_ONCE:
        count = e.builder.sdiv(e.get(left), e.integer(size))
        with e.loop(count):
            here = {**at, "x": e.get(x), "out": e.get(out)}
            _rows(e, form, size, here, tiles)
            step = RUN_BYTES[coding] * size
            step = e.times(at["x_stride"], size) if size == ROWS_TOGETHER else e.integer(step)
            e.set(x, e.add(here["x"], step))
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
        tiles = Unpacked(e, at, e.builder.ptrtoint(space, I64), first, count)
        _all_rows(e, NIBBLES, at, rows, tiles)


def _product(e: Any, form: int, at: dict[str, Any], rows: Any) -> None:
    at = {**at, **_fetching(e, form, at, rows)}
    if form != NIBBLES or not HAS_TWO_PORTS:
        _all_rows(e, form, at, rows, Packed(e, form, at))
        return
    is_many = e.builder.icmp_signed(">=", rows, e.integer(MANY_ROWS))
    with e.builder.if_else(is_many) as (many, few):
        with many:
            _unpacked_product(e, at, rows)
        with few:
            _all_rows(e, form, at, rows, Packed(e, form, at))


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
