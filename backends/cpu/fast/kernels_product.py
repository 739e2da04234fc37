"""The product of activations with a held weight: one routine for every form and number of rows.

A weight is tiles of 16 outputs x 32 inputs, those of the same outputs one after the other along the
inputs. Lane i of a vector is output i; a 32-bit lane of codes holds 4 consecutive inputs, so one
broadcast of 4 activation bytes meets 16 outputs. Rows are taken 8 at a time: codes are unpacked once.

Activations come in one of three codings, by group of 32 inputs. WIDE: whole numbers of 15 bits, kept as two
int8 (256 * high + low). NARROW: 8 bits. After either come records, one per group: scale f32, scale * sum f32,
and -128 times the sum of the codes, of the first 16 and of the last 16 (i32). BRAIN: bf16, for such weights.
docs/performance.md has what each costs and what was tried.
"""

from __future__ import annotations

from typing import Any

from headrace.backends.cpu.fast.intrinsics import (
    DOT_SHIFTS_SIGNED,
    F32,
    FLOATS,
    I32,
    INTS,
    routine,
)

NIBBLES = 0
"""256 bytes: byte j of a 64-byte run holds inputs j % 4 of two quads; 16 scales f16, 16 minima f16."""
BYTES_SIGNED = 1
"""512 bytes of w + 128; 16 scales f16."""
BYTES_WITH_MINIMUM = 2
"""512 bytes of 0 .. 127; 16 scales f16, 16 minima f16."""
BYTES_IN_HALVES = 3
"""512 bytes of w + 128; 16 scales f16 for the first 16 inputs, 16 for the last."""
PLAIN = 4
"""1,024 bytes: 16 runs of 16 pairs of bf16, two consecutive inputs of an output in a pair."""

TILE_BYTES = (320, 544, 576, 576, 1024)
GROUP = 32
WIDE, NARROW, BRAIN = range(3)
"""How activations are coded."""
CODE_BYTES = (64, 32, 64)
"""Of a group of activations in each coding; WIDE: 32 high bytes, then 32 low ones."""
RECORD_BYTES = (20, 20, 0)
EXCESS, EXCESS_FIRST, EXCESS_LAST = 8, 12, 16
"""Where a record has what dot products of codes w + 128 are too large by."""
ROWS_AT_ONCE = (8, 4, 2, 1)
ROWS_IN_FLIGHT = 4
"""Rows whose integer sums are in registers together, beside the results of 8."""
PREFETCH_TILES = 8
PRODUCTS = (
    *((form, coding) for form in range(PLAIN) for coding in (WIDE, NARROW)),
    (PLAIN, BRAIN),
)
"""The pairs of form and coding that there is code for."""


def _codes(e: Any, tile: Any, form: int) -> list[Any]:
    """Return the 8 quads of inputs of a tile as vectors of 16 x 4 bytes."""
    if form != NIBBLES:
        return [e.load(tile, INTS, 64 * quad) for quad in range(8)]
    mask, quads = e.fill(0x0F0F0F0F, INTS), []
    for pair in range(4):
        packed = e.load(tile, INTS, 64 * pair)
        high = e.builder.lshr(packed, e.fill(4, INTS))
        quads += [e.builder.and_(packed, mask), e.builder.and_(high, mask)]
    return quads


def _sums(
    e: Any, form: int, coding: int, codes: list[Any], x: list[Any], records: list[Any]
) -> list[list[Any]]:
    """Return each row's integer products: of the whole group, or of its halves where those are scaled apart.

    Rows advance together, quad by quad, so that no dot product waits for the one before it.
    """
    is_signed = form in (BYTES_SIGNED, BYTES_IN_HALVES)
    places = (EXCESS_FIRST, EXCESS_LAST) if form == BYTES_IN_HALVES else (EXCESS,)
    size = 8 // len(places)
    found: list[list[Any]] = [[] for _ in x]
    for half, place in enumerate(places):
        totals = [[e.fill(0, INTS) for _ in range(2 - coding)] for _ in x]
        if is_signed and DOT_SHIFTS_SIGNED:
            for total, record in zip(totals, records, strict=True):
                total[-1] = e.broadcast(e.load(record, I32, place))
        for quad in range(size * half, size * (half + 1)):
            for total, row in zip(totals, x, strict=True):
                for part in range(2 - coding):
                    value = e.broadcast(e.load(row, I32, GROUP * part + 4 * quad))
                    total[part] = e.dot(total[part], codes[quad], value, is_signed=is_signed)
        for total, sums in zip(totals, found, strict=True):
            if coding == WIDE:
                total[0] = e.builder.add(e.builder.shl(total[0], e.fill(8, INTS)), total[1])
            sums.append(total[0])
    return found


def _add_coded(
    e: Any, form: int, coding: int, tile: Any, x: list[Any], records: list[Any], totals: list[Any]
) -> None:
    """Add one tile to every row's total. `x` and `records` are one address per row."""
    builder, codes = e.builder, _codes(e, tile, form)
    end = 256 if form == NIBBLES else 512
    scale = e.load_halves(tile, end)
    second = None if form == BYTES_SIGNED else e.load_halves(tile, end + 32)
    for first in range(0, len(totals), ROWS_IN_FLIGHT):
        some = slice(first, first + ROWS_IN_FLIGHT)
        sums = _sums(e, form, coding, codes, x[some], records[some])
        for total, record, parts in zip(totals[some], records[some], sums, strict=True):
            x_scale, result = e.broadcast(e.load(record, F32, 0)), e.get(total)
            for factor, part in zip((scale, second), parts, strict=False):
                factor = builder.fmul(factor, x_scale)
                result = e.fma(builder.sitofp(part, FLOATS), factor, result)
            if second is not None and form != BYTES_IN_HALVES:
                result = e.fma(second, e.broadcast(e.load(record, F32, 4)), result)
            e.set(total, result)


def _add_plain(e: Any, tile: Any, x: list[Any], totals: list[Any]) -> None:
    """Add one tile of bf16 to every row's total; `x` are addresses of bf16."""
    for pair in range(16):
        packed = e.load(tile, INTS, 64 * pair)
        for row, total in zip(x, totals, strict=True):
            value = e.broadcast(e.load(row, I32, 4 * pair))
            e.set(total, e.dot_brain(e.get(total), packed, value))


def _rows(e: Any, form: int, coding: int, num_rows: int, at: dict[str, Any]) -> None:
    """Multiply `num_rows` rows, from the addresses `at` on, with one column of tiles."""
    offsets = [e.times(at["x_stride"], row) for row in range(num_rows)]
    start = e.fill(0.0)
    slot = e.variable(start)
    is_biased = e.builder.icmp_signed("!=", at["bias"], e.integer(0))
    with e.builder.if_then(is_biased):
        e.set(slot, e.load(at["bias"]))
    totals = [e.variable(start) for _ in range(num_rows)]
    for total in totals:
        e.set(total, e.get(slot))
    with e.loop(at["groups"]) as loop:
        tile = e.add(at["tiles"], e.times(loop.index, TILE_BYTES[form]))
        for line in range(0, TILE_BYTES[form], 64):
            e.prefetch(tile, PREFETCH_TILES * TILE_BYTES[form] + line)
        first = e.add(at["x"], e.times(loop.index, CODE_BYTES[coding]))
        x = [e.add(first, offset) for offset in offsets]
        if form == PLAIN:
            _add_plain(e, tile, x, totals)
        else:
            record = e.add(at["x"], e.times(at["groups"], CODE_BYTES[coding]))
            record = e.add(record, e.times(loop.index, RECORD_BYTES[coding]))
            records = [e.add(record, offset) for offset in offsets]
            _add_coded(e, form, coding, tile, x, records, totals)
    for row, total in enumerate(totals):
        e.store(e.get(total), at["out"], e.times(at["out_stride"], row))


def _product(e: Any, form: int, coding: int, at: dict[str, Any], rows: Any) -> None:
    x, out, left = e.variable(at["x"]), e.variable(at["out"]), e.variable(rows)
    for size in ROWS_AT_ONCE:
        count = e.builder.sdiv(e.get(left), e.integer(size))
        with e.loop(count):
            here = {**at, "x": e.get(x), "out": e.get(out)}
            _rows(e, form, coding, size, here)
            e.set(x, e.add(here["x"], e.times(at["x_stride"], size)))
            e.set(out, e.add(here["out"], e.times(at["out_stride"], size)))
        e.set(left, e.builder.srem(e.get(left), e.integer(size)))


@routine()
def product(
    e: Any, form: Any, coding: Any, tiles: Any, groups: Any, x: Any, x_stride: Any, out: Any,
    out_stride: Any, bias: Any, rows: Any,
) -> None:  # fmt: skip
    """out[row, 0:16] = x[row] times one column of tiles (+ bias[0:16] where its address is not 0)."""
    at = {
        "tiles": tiles, "groups": groups, "x": x, "x_stride": x_stride, "out": out,
        "out_stride": out_stride, "bias": bias,
    }  # fmt: skip
    end = e.builder.append_basic_block("product.end")
    number = e.add(form, e.times(coding, len(TILE_BYTES)))
    choice = e.builder.switch(number, end)
    for known_form, known_coding in PRODUCTS:
        block = e.builder.append_basic_block(f"product.form{known_form}.coding{known_coding}")
        choice.add_case(e.integer(known_form + known_coding * len(TILE_BYTES)), block)
        e.builder.position_at_end(block)
        _product(e, known_form, known_coding, at, rows)
        e.builder.branch(end)
    e.builder.position_at_end(end)
