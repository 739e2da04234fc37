"""How threads share a product with a held weight, column by column, and what is done with a column at once.

Most products write f32 where they are told. Behind the product of a gate and what it lets through, the
activation follows at once, where the numbers still are in the first-level cache: a thread takes the columns
of 32 inputs of the next product, of both halves, gates them and writes their codes. 256 bytes of a row that
other threads would read become 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel, inlined_kernel
from headrace.backends.cpu.fast.intrinsics import FLOATS, I32, INTS, LANES, routine
from headrace.backends.cpu.fast.intrinsics_reductions import larger_float, largest_of_eight
from headrace.backends.cpu.fast.intrinsics_threads import atomic_add, call_at
from headrace.backends.cpu.fast.kernels_attend_rows import fetch_run
from headrace.backends.cpu.fast.kernels_coding import BRAIN, CODES, GROUP, ROWS_TOGETHER, coded_row
from headrace.backends.cpu.fast.kernels_product import PREFETCH_TILES, product
from headrace.backends.cpu.fast.kernels_quantize import (
    GATED_ROW,
    quantize_rows,
)
from headrace.backends.cpu.fast.kernels_rowwise import gelu_row, observe_row, silu_row
from headrace.backends.cpu.fast.kernels_tiles import PLAIN, TILE_BYTES
from headrace.backends.cpu.kernels_rows import longs

CHUNKS_PER_THREAD = 8
ROWS_PER_SHARE, MAX_SHARES = 48, 8
MAX_COLUMNS_PER_CHUNK = 8
COLUMN_BYTES = 4 * LANES
"""Of a row's results."""
GATED_COLUMNS = 2 * GROUP // LANES
"""That are taken together: of the gate, then of what it lets through."""
GATED_ROWS = 256
"""That wait for their gate at once; their columns' weights are still near when the next ones come."""
GATED_BYTES = GATED_ROWS * GATED_ROW
NUM_ARGUMENTS, ARGUMENT_BYTES = 10, 128
"""Of multiply_unit, at the end of a thread's scratch."""
TOPS_BYTES = 4 * ROWS_TOGETHER
"""Of the largest results of a column, of ROWS_TOGETHER rows."""


@fast_kernel
def chunk_of(total, threads, most):  # type: ignore[no-untyped-def]
    """How many pieces of `total` a thread takes at once."""
    if threads == 1:
        return max(1, total)
    return min(most, max(1, total // (threads * CHUNKS_PER_THREAD)))


@fast_kernel
def num_shares(rows, threads, least):  # type: ignore[no-untyped-def]
    """Into how many shares rows are cut, of `least` and more, which stay with a thread from one operation to
    the next."""
    return min(threads, MAX_SHARES) if rows >= threads * least else 1


@fast_kernel
def share_begin(rows, shares, share):  # type: ignore[no-untyped-def]
    """The first row of a share; the end of the one before."""
    return rows if share == shares else rows // ROWS_TOGETHER * share // shares * ROWS_TOGETHER


@fast_kernel
def is_gated(op):  # type: ignore[no-untyped-def]
    return op[at.GATE] == at.SILU or op[at.GATE] == at.GELU


@fast_kernel
def columns_together(op):  # type: ignore[no-untyped-def]
    return GATED_COLUMNS if is_gated(op) else 1


@fast_kernel
def units_per_chunk(op, threads):  # type: ignore[no-untyped-def]
    """How many columns, or columns together, a thread takes at once."""
    together = columns_together(op)
    return chunk_of(op[at.COUNT] // together, threads, MAX_COLUMNS_PER_CHUNK // together)


@fast_kernel
def column_of(op, unit, part):  # type: ignore[no-untyped-def]
    """Which column is number `part` of a unit."""
    if not is_gated(op):
        return unit
    half = GATED_COLUMNS // 2
    later = op[at.COUNT] // 2 if part >= half else 0
    return half * unit + part % half + later


@fast_kernel
def fetch_first_tiles(op, rows, threads, tid):  # type: ignore[no-untyped-def]
    """Ask for what thread `tid` reads first in a product, while there is nothing else to do."""
    tile_bytes = TILE_BYTES[op[at.FORM]]
    column_bytes = op[at.SIZE] * tile_bytes
    turn = tid % threads if num_shares(rows, threads, ROWS_PER_SHARE) == 1 else 0
    first = column_of(op, turn * units_per_chunk(op, threads), 0)
    if first < op[at.COUNT]:
        size = min(column_bytes, PREFETCH_TILES * tile_bytes)
        fetch_run(op[at.POINTER] + first * column_bytes, size)


@inlined_kernel
def gate_rows(op, unit, first, rows, numbers, quantized, observes):  # type: ignore[no-untyped-def]
    """Gate 32 columns of `rows` rows from `first` on, whose numbers are GATED_ROW apart, and code them."""
    for row in range(rows):
        gate = numbers + row * GATED_ROW
        if op[at.GATE] == at.SILU:
            silu_row(gate, gate + GATED_ROW // 2, gate, GROUP)
        else:
            gelu_row(gate, gate + GATED_ROW // 2, gate, GROUP)
        if observes and op[at.CODING] == CODES:
            observe_row(gate, GROUP, op[at.LOUDNESS] + unit * GROUP * 4)
    groups, coding = op[at.COUNT] // GATED_COLUMNS, op[at.CODING]
    for row in range(0, rows, ROWS_TOGETHER):
        out = coded_row(quantized, first + row, op[at.QUANTIZED_STRIDE], coding)
        count = min(rows - row, ROWS_TOGETHER)
        quantize_rows(numbers + row * GATED_ROW, count, unit, groups, coding, op[at.GATE_PLAN], out)


@routine()
def keep_tops(e: Any, numbers: Any, rows: Any, valid: Any, out: Any, stride: Any) -> None:
    """The largest of the first `valid` of each row's 16 results, of ROWS_TOGETHER rows side by side.

    numbers: COLUMN_BYTES a row. What is told of rows behind `rows` means nothing. stride: from 8 rows to the
    next.
    """
    lanes = ir.Constant(INTS, list(range(LANES)))
    is_valid = e.builder.icmp_signed("<", lanes, e.broadcast(e.builder.trunc(valid, I32)))
    blocks = e.builder.sdiv(e.add(rows, ROWS_TOGETHER - 1), e.integer(ROWS_TOGETHER))
    with e.loop(blocks) as loop:
        block = e.add(numbers, e.times(loop.index, ROWS_TOGETHER * COLUMN_BYTES))
        values = [e.load(block, FLOATS, COLUMN_BYTES * row) for row in range(ROWS_TOGETHER)]
        values = [e.builder.select(is_valid, value, e.fill(-np.inf)) for value in values]
        most = largest_of_eight(e, values, larger_float)
        e.store(most, e.add(out, e.builder.mul(loop.index, stride)))


@inlined_kernel
def multiply_unit(op, unit, after, begin, end, places, observes):  # type: ignore[no-untyped-def]
    """Multiply rows `begin` .. `end - 1` with a unit's columns, and ask for those of unit `after` meanwhile.

    places: of what is read, of what is written, of codes, scratch, and of tops; the last 0: there are logits.
    """
    x, out, quantized, scratch, tops = places
    form, groups, bias, plan = op[at.FORM], op[at.SIZE], op[at.SECOND_POINTER], op[at.PLAN]
    coding = BRAIN if form == PLAIN else CODES
    column_bytes = groups * TILE_BYTES[form]
    together, gates = columns_together(op), is_gated(op)
    at_once = GATED_ROWS if gates else end - begin
    if tops != 0:
        x, plan, at_once = quantized, op[at.GATE_PLAN], GATED_BYTES // COLUMN_BYTES
    for row in range(begin, end, at_once):
        count = min(at_once, end - row)
        source = coded_row(x, row, op[at.IN_STRIDE], coding)
        for part in range(together):
            column = column_of(op, unit, part)
            then = column_of(op, unit, part + 1)
            if part + 1 == together:
                then = column_of(op, after if row + count == end else unit, 0)
            target, stride = scratch + part * COLUMN_BYTES, GATED_ROW if gates else COLUMN_BYTES
            if not gates and tops == 0:
                stride = op[at.OUT_STRIDE]
                target = out + column * COLUMN_BYTES + row * stride
            product(
                form, plan, op[at.POINTER] + column * column_bytes,
                op[at.POINTER] + then * column_bytes, groups, source, op[at.IN_STRIDE], target, stride,
                bias + column * COLUMN_BYTES if bias != 0 else 0, count,
            )  # fmt: skip
        if gates:
            gate_rows(op, unit, row, count, scratch, quantized, observes)
        if tops != 0:
            place = tops + row * op[at.AUX_STRIDE] + unit * TOPS_BYTES
            valid = op[at.SECOND_NUMBER] - unit * LANES
            keep_tops(scratch, count, valid, place, ROWS_TOGETHER * op[at.AUX_STRIDE])


@fast_kernel
def run_unit(call, op_at, unit, after, begin, end, places, observes):  # type: ignore[no-untyped-def]
    """multiply_unit, through an address (see kernels_unit); call: that, and where its arguments go."""
    function, arguments_at = call
    a = longs(arguments_at, NUM_ARGUMENTS)
    a[0], a[1], a[2], a[3], a[4] = op_at, unit, after, begin, end
    a[5], a[6], a[7], a[8], a[9] = places
    call_at(function, arguments_at, 1 if observes else 0, 0)


@inlined_kernel
def run_linear(op, rows, threads, tid, counter, places, observes, call, op_at):  # type: ignore[no-untyped-def]
    """Each thread's first columns are given, which `fetch_first_tiles` knows; then it takes what comes next.

    It takes them early, so that the weights of the next columns can be asked for during the last ones.
    """
    together = columns_together(op)
    units = op[at.COUNT] // together if rows > 0 else 0
    chunk = units_per_chunk(op, threads)
    shares = num_shares(rows, threads, ROWS_PER_SHARE)
    given = threads * chunk if shares == 1 else 0
    for number in range(shares):
        share = (tid + number) % shares
        begin, end = share_begin(rows, shares, share), share_begin(rows, shares, share + 1)
        taken = counter + share * 8
        first = tid % threads * chunk if shares == 1 else atomic_add(taken, chunk)
        while first < units:
            following = given + atomic_add(taken, chunk)
            last = min(units, first + chunk) - 1
            for unit in range(first, last + 1):
                after = following if unit == last else unit + 1
                after = after if after < units else unit
                run_unit(call, op_at, unit, after, begin, end, places, observes)
            first = following
