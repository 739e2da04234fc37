"""The product of activations with a held weight: one routine for every form and number of rows.

A weight is tiles of 16 outputs x 32 inputs, those of the same outputs one after the other along the
inputs. Lane i of a vector is output i; a 32-bit lane of codes holds 4 consecutive inputs, so one
broadcast of 4 activation bytes meets 16 outputs. Rows are taken 8 at a time: codes are unpacked once.

Activations are whole numbers of 15 bits and a scale per group of 32, kept as two int8 (256 * high + low),
since 8 bits alone cost one best token in forty. After the codes of a row come its records of 16 bytes:
scale f32, scale * sum f32, the sums of the first and the last 16 i32. docs/performance.md has what was tried.
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
CODE_BYTES = 64
"""Of a group of activations: 32 high bytes, then 32 low ones."""
RECORD_BYTES = 16
ROWS_AT_ONCE = (8, 4, 2, 1)
PREFETCH_TILES = 8


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


def _half_sums(e: Any, codes: list[Any], x: Any, *, is_signed: bool, record: Any) -> list[Any]:
    """Return the integer products of inputs 0 .. 15 and 16 .. 31, as two vectors."""
    sums = []
    for half in range(2):
        parts = []
        for low in range(2):
            part = e.fill(0, INTS)
            for quad in range(4 * half, 4 * half + 4):
                value = e.broadcast(e.load(x, I32, GROUP * low + 4 * quad))
                part = e.dot(part, codes[quad], value, is_signed=is_signed)
            parts.append(part)
        total = e.builder.add(e.builder.shl(parts[0], e.fill(8, INTS)), parts[1])
        if is_signed and DOT_SHIFTS_SIGNED:
            excess = e.broadcast(e.load(record, I32, 8 + 4 * half))
            total = e.builder.sub(total, e.builder.shl(excess, e.fill(7, INTS)))
        sums.append(total)
    return sums


def _add_coded(e: Any, form: int, tile: Any, x: Any, records: Any, totals: list[Any]) -> None:
    """Add one tile to every row's total. `x` and `records` are one address per row."""
    builder, codes = e.builder, _codes(e, tile, form)
    end = 256 if form == NIBBLES else 512
    scale = e.load_halves(tile, end)
    second = None if form == BYTES_SIGNED else e.load_halves(tile, end + 32)
    is_signed = form in (BYTES_SIGNED, BYTES_IN_HALVES)
    for row, total in enumerate(totals):
        record = records[row]
        sums = _half_sums(e, codes, x[row], is_signed=is_signed, record=record)
        x_scale = e.broadcast(e.load(record, F32, 0))
        result = e.get(total)
        if form == BYTES_IN_HALVES:
            for half_scale, half in zip((scale, second), sums, strict=True):
                factor = builder.fmul(half_scale, x_scale)
                result = e.fma(builder.sitofp(half, FLOATS), factor, result)
        else:
            whole = builder.sitofp(builder.add(*sums), FLOATS)
            result = e.fma(whole, builder.fmul(scale, x_scale), result)
            if second is not None:
                result = e.fma(second, e.broadcast(e.load(record, F32, 4)), result)
        e.set(total, result)


def _add_plain(e: Any, tile: Any, x: Any, totals: list[Any]) -> None:
    """Add one tile of bf16 to every row's total; `x` are addresses of f32."""
    for pair in range(16):
        packed = e.load(tile, INTS, 64 * pair)
        low, high = e.widen_low(packed), e.widen_high(packed)
        for row, total in enumerate(totals):
            first = e.broadcast(e.load(x[row], F32, 8 * pair))
            second = e.broadcast(e.load(x[row], F32, 8 * pair + 4))
            e.set(total, e.fma(high, second, e.fma(low, first, e.get(total))))


def _rows(e: Any, form: int, num_rows: int, at: dict[str, Any]) -> None:
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
    x_bytes = 4 * GROUP if form == PLAIN else CODE_BYTES
    with e.loop(at["groups"]) as loop:
        tile = e.add(at["tiles"], e.times(loop.index, TILE_BYTES[form]))
        for line in range(0, TILE_BYTES[form], 64):
            e.prefetch(tile, PREFETCH_TILES * TILE_BYTES[form] + line)
        first = e.add(at["x"], e.times(loop.index, x_bytes))
        x = [e.add(first, offset) for offset in offsets]
        if form == PLAIN:
            _add_plain(e, tile, x, totals)
        else:
            record = e.add(at["x"], e.times(at["groups"], CODE_BYTES))
            record = e.add(record, e.times(loop.index, RECORD_BYTES))
            records = [e.add(record, offset) for offset in offsets]
            _add_coded(e, form, tile, x, records, totals)
    for row, total in enumerate(totals):
        e.store(e.get(total), at["out"], e.times(at["out_stride"], row))


def _product(e: Any, form: int, at: dict[str, Any], rows: Any) -> None:
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
    e: Any, form: Any, tiles: Any, groups: Any, x: Any, x_stride: Any, out: Any, out_stride: Any,
    bias: Any, rows: Any,
) -> None:  # fmt: skip
    """out[row, 0:16] = x[row] times one column of tiles (+ bias[0:16] where its address is not 0)."""
    at = {
        "tiles": tiles, "groups": groups, "x": x, "x_stride": x_stride, "out": out,
        "out_stride": out_stride, "bias": bias,
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
