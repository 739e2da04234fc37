"""The best token of a row without all of its logits: rough ones tell where it can be, exact ones which it is.

Where only the best token is wanted, logits are not written. Their product is computed from 8 bits of every
input (ROUGH: of wide groups the high bytes alone), and of each 16 logits the largest is kept. What that is off
by is bounded: by Cauchy and Schwarz a group adds no more than the norm of what rounding took off its inputs
times the largest norm of any output's weights. PICK computes exactly, in the way in which all of them are
otherwise computed, those 16 whose largest comes within twice the bound of the best. So the token is the same.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel, inlined_kernel
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.intrinsics_threads import atomic_add
from headrace.backends.cpu.fast.kernels_coding import (
    CODES,
    EXCESS,
    FLOAT_BITS,
    GROUP,
    PLAN_BYTES,
    PLAN_WIDE,
    RECORD_SCALE,
    RECORD_SUM,
    ROWS_TOGETHER,
    RUN_BYTES,
    coded_row,
    group_bytes,
)
from headrace.backends.cpu.fast.kernels_matmul import COLUMN_BYTES, TOPS_BYTES, run_unit
from headrace.backends.cpu.fast.kernels_rowwise import byte_at, bytes_of, half_at
from headrace.backends.cpu.fast.kernels_tiles import BYTES_SIGNED, TILE_BYTES
from headrace.backends.cpu.kernels_rows import floats, ints, longs
from headrace.backends.cpu.kernels_vector import as_pointer

_GROUP_BYTES = group_bytes(CODES)
_SLACK = np.float32(1e-4)
"""Of the sum of all magnitudes: what sums of floats in another order can be off by, with room."""
_SURE = np.float32(1e30)
"""From here on, and where a row is broken, a bound tells nothing: all logits are looked at."""


@fast_kernel
def _signed(address):  # type: ignore[no-untyped-def]
    """32 codes as i8."""
    return carray(as_pointer(address), (GROUP,), np.int8)


@fast_kernel
def is_wide_at(plan, group):  # type: ignore[no-untyped-def]
    return byte_at(plan + group * PLAN_BYTES + PLAN_WIDE) != 0


@fast_kernel
def rough_row(groups, plan, source, target):  # type: ignore[no-untyped-def]
    """Write a coded row as one of narrow groups: high bytes stay, and count 256 times as much."""
    for group in range(groups):
        run, out = source + group * _GROUP_BYTES, target + group * _GROUP_BYTES
        words, copied = longs(run, RUN_BYTES[CODES] // 8), longs(out, RUN_BYTES[CODES] // 8)
        for i in range(RUN_BYTES[CODES] // 8):
            copied[i] = words[i]
        if not is_wide_at(plan, group):
            continue
        codes, first, last = _signed(run), np.int32(0), np.int32(0)
        for i in range(GROUP // 2):
            first += np.int32(codes[i])
            last += np.int32(codes[GROUP // 2 + i])
        floats(out + RECORD_SCALE, 1)[0] *= np.float32(256.0)
        floats(out + RECORD_SUM, 1)[0] = np.float32(first + last)
        begins = ints(out + EXCESS, 3)
        begins[0] = np.int32(FLOAT_BITS) - np.int32(128) * (first + last)
        begins[1] = np.int32(FLOAT_BITS) - np.int32(128) * first
        begins[2] = np.int32(FLOAT_BITS) - np.int32(128) * last


@fast_kernel
def group_norms(tiles, columns, groups, norms):  # type: ignore[no-untyped-def]
    """norms[g] = the largest norm of an output's weights in group g; BYTES_SIGNED. NaN where a scale is."""
    squares = np.zeros(4 * LANES, np.int32)
    norms[:] = np.float32(0.0)
    for column in range(columns):
        for group in range(groups):
            tile = tiles + (column * groups + group) * TILE_BYTES[BYTES_SIGNED]
            codes = bytes_of(tile, GROUP * LANES)
            squares[:] = 0
            for run in range(GROUP // 4):
                for i in range(4 * LANES):
                    weight = np.int32(codes[4 * LANES * run + i]) - np.int32(128)
                    squares[i] += weight * weight
            for lane in range(LANES):
                total = squares[4 * lane : 4 * lane + 4].sum()
                scale = half_at(tile + GROUP * LANES + 2 * lane)
                norm = abs(scale) * np.sqrt(np.float32(total))
                if not norm <= norms[group]:
                    norms[group] = norm


@fast_kernel
def _bound(groups, plan, row, behind, norms):  # type: ignore[no-untyped-def]
    """What a rough logit of a coded row can be off by."""
    bound = np.float32(0.0)
    for group in range(groups):
        run = row + group * _GROUP_BYTES
        high, low = _signed(run), _signed(run + behind)
        taken, kept = np.float32(0.0), np.float32(0.0)
        if is_wide_at(plan, group):
            for i in range(GROUP):
                off = np.float32(low[i])
                whole = np.float32(256.0) * np.float32(high[i]) + off
                taken += off * off
                kept += whole * whole
        else:
            for i in range(GROUP):
                kept += np.float32(high[i]) * np.float32(high[i])
        scale = floats(run + RECORD_SCALE, 1)[0]
        bound += norms[group] * scale * (np.sqrt(taken) + _SLACK * np.sqrt(kept))
    return bound * np.float32(1.001)


@inlined_kernel
def pick_rows(op, head_at, block, rows, places, picked, call):  # type: ignore[no-untyped-def]
    """Write the best tokens of ROWS_TOGETHER rows, and which rows have none.

    places: coded rows, the largest of each tile, logits of row 0, scratch. What one of the rows asks for is
    computed for all: where nearly everything may be the best, that costs as much as all logits do.
    """
    x, tops_at, logits_at, scratch = places
    token_ids, failed = picked
    head = longs(head_at, at.NUM_FIELDS)
    columns, vocab, norms = head[at.COUNT], op[at.SIZE], floats(op[at.POINTER], head[at.SIZE])
    tops = floats(tops_at + block * ROWS_TOGETHER * op[at.AUX_STRIDE], columns * ROWS_TOGETHER)
    first = block * ROWS_TOGETHER
    count = min(ROWS_TOGETHER, rows - first)
    least, found = floats(scratch, ROWS_TOGETHER), floats(scratch + TOPS_BYTES, ROWS_TOGETHER)
    for lane in range(count):
        best = np.float32(-np.inf)
        for tile in range(columns):
            best = max(best, tops[tile * ROWS_TOGETHER + lane])
        coded = coded_row(x, first + lane, head[at.IN_STRIDE], CODES)
        bound = _bound(head[at.SIZE], head[at.PLAN], coded, head[at.SIZE] * _GROUP_BYTES, norms)
        failed[first + lane], token_ids[first + lane], found[lane] = False, 0, np.float32(-np.inf)
        least[lane] = best - np.float32(2.0) * bound if bound < _SURE else np.float32(-np.inf)
    for tile in range(columns):
        is_near = False
        for lane in range(count):
            is_near |= not tops[tile * ROWS_TOGETHER + lane] < least[lane]
        if not is_near:
            continue
        run_unit(
            call, head_at, tile, tile, first, first + count, (x, logits_at, 0, scratch, 0), False
        )
        for lane in range(count):
            row = first + lane
            logits = floats(logits_at + row * head[at.OUT_STRIDE] + tile * COLUMN_BYTES, LANES)
            for i in range(min(LANES, vocab - tile * LANES)):
                failed[row] |= logits[i] != logits[i]
                if logits[i] > found[lane]:
                    found[lane], token_ids[row] = logits[i], tile * LANES + i
    for lane in range(count):
        failed[first + lane] |= not np.isfinite(found[lane])


@inlined_kernel
def run_picked(op, parameters, index, rows, counter, places, call):  # type: ignore[no-untyped-def]
    """ROUGH, before the product that gives logits, or PICK, behind it."""
    x, aux, out, scratch = places
    while True:
        block = atomic_add(counter, 1)
        if block * ROWS_TOGETHER >= rows:
            break
        if op[at.CODE] == at.PICK:
            head_at = parameters[at.PROGRAM] + (index - 1) * at.NUM_FIELDS * 8
            picked = ints(parameters[at.PICKED], rows), bytes_of(parameters[at.PICKED_FAILED], rows)
            pick_rows(op, head_at, block, rows, (x, aux, out, scratch), picked, call)
            continue
        for row in range(block * ROWS_TOGETHER, min(rows, (block + 1) * ROWS_TOGETHER)):
            source = coded_row(x, row, op[at.IN_STRIDE], CODES)
            rough_row(
                op[at.SIZE], op[at.PLAN], source, coded_row(out, row, op[at.OUT_STRIDE], CODES)
            )
