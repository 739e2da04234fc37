"""What is done to one row of activations: norms, gates, quantization, embedding, rotation, keys and values.

Rows are f32 at an address; sizes are multiples of 16. A NaN or infinity anywhere in a group makes its scale NaN,
so that broken numbers reach the logits and fail their sequence instead of turning into plausible integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import (
    BYTES,
    F16,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    SHORTS,
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
    GROUP,
    PLAN_BYTES,
    PLAN_FACTORS,
    RECORD_SCALE,
    RECORD_SUM,
    RUN_BYTES,
    WIDE_IS_SHORT,
    group_bytes,
    has_doubles,
    is_wide,
    low_codes_behind,
)
from headrace.backends.cpu.fast.kernels_tiles import (
    BYTES_IN_HALVES,
    BYTES_SIGNED,
    FORMS_WITH_ROOM,
    NIBBLES,
    PLAIN,
)
from headrace.backends.cpu.kernels_rows import floats
from headrace.backends.cpu.kernels_vector import as_pointer

_ROW = 4 * LANES
_HIGHEST_WIDE, _HIGHEST_NARROW = 127 * 256.0, 127.0
"""The largest code; of a wide one the high byte must fit int8."""
_SQRT_2_OVER_PI = 0.7978845608028654


def _vectors(e: Any, size: Any) -> Any:
    return e.loop(e.builder.sdiv(size, e.integer(LANES)))


@routine()
def add_rows(e: Any, x: Any, total: Any, size: Any) -> None:
    """total[i] += x[i]."""
    with _vectors(e, size) as loop:
        offset = e.times(loop.index, _ROW)
        value = e.builder.fadd(e.load(e.add(x, offset)), e.load(e.add(total, offset)))
        e.store(value, e.add(total, offset))


@routine("float")
def sum_of_squares(e: Any, x: Any, size: Any) -> Any:
    total = e.variable(e.fill(0.0))
    with _vectors(e, size) as loop:
        value = e.load(e.add(x, e.times(loop.index, _ROW)))
        e.set(total, e.fma(value, value, e.get(total)))
    return e.sum_lanes(e.get(total))


@routine(floats=("factor",))
def scale_row(e: Any, x: Any, factor: Any, weight: Any, out: Any, size: Any) -> None:
    """out[i] = x[i] * factor * weight[i]."""
    spread = e.broadcast(factor)
    with _vectors(e, size) as loop:
        offset = e.times(loop.index, _ROW)
        value = e.builder.fmul(e.load(e.add(x, offset)), spread)
        value = e.builder.fmul(value, e.load(e.add(weight, offset)))
        e.store(value, e.add(out, offset))


@routine(floats=("factor",))
def copy_scaled(e: Any, x: Any, factor: Any, out: Any, size: Any) -> None:
    """out[i] = x[i] * factor."""
    spread = e.broadcast(factor)
    with _vectors(e, size) as loop:
        offset = e.times(loop.index, _ROW)
        e.store(e.builder.fmul(e.load(e.add(x, offset)), spread), e.add(out, offset))


@routine(floats=("cap",))
def cap_row(e: Any, x: Any, cap: Any, size: Any) -> None:
    """x[i] = cap * tanh(x[i] / cap)."""
    spread = e.broadcast(cap)
    with _vectors(e, size) as loop:
        place = e.add(x, e.times(loop.index, _ROW))
        capped = e.tanh(e.builder.fdiv(e.load(place), spread))
        e.store(e.builder.fmul(capped, spread), place)


@routine()
def silu_row(e: Any, gate: Any, up: Any, out: Any, size: Any) -> None:
    """out[i] = silu(gate[i]) * up[i]."""
    builder = e.builder
    with _vectors(e, size) as loop:
        offset = e.times(loop.index, _ROW)
        x, y = e.load(e.add(gate, offset)), e.load(e.add(up, offset))
        below = builder.fadd(e.fill(1.0), e.exp(builder.fsub(e.fill(-0.0), x)))
        e.store(builder.fdiv(builder.fmul(x, y), below), e.add(out, offset))


@routine()
def gelu_row(e: Any, gate: Any, up: Any, out: Any, size: Any) -> None:
    """out[i] = gelu_tanh(gate[i]) * up[i]."""
    builder = e.builder
    with _vectors(e, size) as loop:
        offset = e.times(loop.index, _ROW)
        x, y = e.load(e.add(gate, offset)), e.load(e.add(up, offset))
        cube = builder.fmul(builder.fmul(x, x), x)
        inner = e.fma(cube, e.fill(0.044715), x)
        bent = e.tanh(builder.fmul(inner, e.fill(_SQRT_2_OVER_PI)))
        half = builder.fmul(builder.fmul(x, e.fill(0.5)), builder.fadd(e.fill(1.0), bent))
        e.store(builder.fmul(half, y), e.add(out, offset))


@routine()
def quantize_row(e: Any, x: Any, groups: Any, coding: Any, plan: Any, out: Any) -> None:
    """Write `groups` x 32 numbers in a coding of kernels_coding; `out` is a coded_row.

    plan: what is read of it for CODES is said there.
    """
    is_coded = e.builder.icmp_signed("==", coding, e.integer(CODES))
    with e.builder.if_else(is_coded) as (codes, brains):
        with codes:
            _write_codes(e, x, groups, plan, out)
        with brains:
            _write_brains(e, x, groups, out)


def _write_brains(e: Any, x: Any, groups: Any, out: Any) -> None:
    with e.loop(e.times(groups, GROUP // LANES)) as loop:
        value = e.load(e.add(x, e.times(loop.index, _ROW)))
        value = value if BRAIN_IS_FLOAT else e.narrow(value)
        half = e.builder.and_(loop.index, e.integer(1))
        run = e.add(out, e.times(e.builder.sub(loop.index, half), group_bytes(BRAIN) // 2))
        e.store(value, e.add(run, e.times(half, RUN_BYTES[BRAIN] // 2)))


def _write_codes(e: Any, x: Any, groups: Any, plan: Any, out: Any) -> None:
    builder = e.builder
    with e.loop(groups) as loop:
        place = e.add(x, e.times(loop.index, 2 * _ROW))
        here = e.add(plan, e.times(loop.index, PLAN_BYTES))
        values = [e.load(place), e.load(place, FLOATS, _ROW)]
        if FORMS_WITH_ROOM:
            values = _divided(e, values, here)
        bits = [e.magnitude_bits(value) for value in values]
        is_less = builder.icmp_signed("<", bits[0], bits[1])
        most = e.largest_magnitude(builder.select(is_less, bits[1], bits[0]))
        is_wide_here = is_wide(e, here)
        highest = builder.select(is_wide_here, F32(_HIGHEST_WIDE), F32(_HIGHEST_NARROW))
        inverse = e.broadcast(builder.fdiv(highest, most))
        share = builder.select(is_wide_here, F32(1 / _HIGHEST_WIDE), F32(1 / _HIGHEST_NARROW))
        is_finite = builder.fcmp_ordered("<", most, F32(np.inf))
        scale = builder.select(is_finite, builder.fmul(most, share), F32(np.nan))
        target = e.add(out, e.times(loop.index, group_bytes(CODES)))
        low_target = e.add(target, low_codes_behind(e, groups))
        codes = [e.to_int(builder.fmul(value, inverse)) for value in values]
        slots = [e.variable(I32(0)) for _ in codes]
        with builder.if_else(is_wide_here) as (wide_here, narrow_here):
            with wide_here:
                for half, code in enumerate(codes):
                    kept = _store_wide(e, code, (target, low_target), half)
                    e.set(slots[half], e.sum_int_lanes(kept))
            with narrow_here:
                for slot, total in zip(slots, _store_narrow(e, codes, target, here), strict=True):
                    e.set(slot, total)
        sums = [e.get(slot) for slot in slots]
        whole = builder.add(*sums)
        e.store(scale, target, RECORD_SCALE)
        e.store(builder.sitofp(whole, F32), target, RECORD_SUM)
        begin = builder.select(is_wide_here, I32(0), I32(FLOAT_BITS))
        for place, total in ((EXCESS, whole), (EXCESS_FIRST, sums[0]), (EXCESS_LAST, sums[1])):
            e.store(builder.sub(begin, builder.shl(total, I32(7))), target, place)


def _divided(e: Any, values: list[Any], plan: Any) -> list[Any]:
    """32 numbers divided by their bytes of a plan: the bits of a power of two and of its inverse add up."""
    builder, slots = e.builder, [e.variable(value) for value in values]
    with builder.if_then(has_doubles(e, plan)):
        for half, slot in enumerate(slots):
            factors = builder.zext(e.load(plan, BYTES, PLAN_FACTORS + LANES * half), INTS)
            factors = builder.bitcast(builder.sitofp(factors, FLOATS), INTS)
            shares = builder.bitcast(builder.sub(e.fill(0x7F000000, INTS), factors), FLOATS)
            e.set(slot, builder.fmul(e.get(slot), shares))
    return [e.get(slot) for slot in slots]


def _store_narrow(e: Any, codes: list[Any], target: Any, plan: Any) -> list[Any]:
    """Store 32 codes as bytes; return the sums of the first and the last 16, times the bytes of the plan."""
    builder = e.builder
    parts = [builder.trunc(code, BYTES) for code in codes]
    for half, part in enumerate(parts):
        e.store(part, target, LANES * half)
    if not FORMS_WITH_ROOM:
        return [e.sum_int_lanes(code) for code in codes]
    factors = [e.load(plan, BYTES, PLAN_FACTORS + LANES * half) for half in range(2)]
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


@routine("float")
def half_at(e: Any, address: Any) -> Any:
    """The f16 at an address, as f32."""
    return e.builder.fpext(e.load(address, F16), F32)


@routine(floats=("value",))
def store_half(e: Any, address: Any, value: Any) -> None:
    """Write an f32 as f16, rounded to even."""
    e.store(e.builder.fptrunc(value, F16), address)


@routine("int")
def byte_at(e: Any, address: Any) -> Any:
    return e.builder.zext(e.load(address, I8), I64)


@routine("float")
def bf16_at(e: Any, address: Any) -> Any:
    """The bf16 at an address, as f32."""
    bits = e.builder.shl(e.builder.zext(e.load(address, I16), I32), I32(16))
    return e.builder.bitcast(bits, F32)


@fast_kernel
def observe_row(x, size, loudness):  # type: ignore[no-untyped-def]
    """loudness[i] = the larger of it and |x[i]|; what is no number says nothing."""
    row, most = floats(x, size), floats(loudness, size)
    for i in range(size):
        magnitude = abs(row[i])
        if magnitude > most[i]:
            most[i] = magnitude


@fast_kernel
def bytes_of(address, count):  # type: ignore[no-untyped-def]
    """View memory as u1 [count]."""
    return carray(as_pointer(address), (count,), np.uint8)


@fast_kernel
def norm_row(x, weight, eps, size, num_groups, out):  # type: ignore[no-untyped-def]
    """out = x / rms(x) * weight, for each of `num_groups` runs of `size`; x and out may be the same."""
    for group in range(num_groups):
        run = x + group * size * 4
        mean = sum_of_squares(run, size) / np.float32(size)
        factor = np.float32(1.0) / np.sqrt(mean + eps)
        scale_row(run, factor, weight, out + group * size * 4, size)


@fast_kernel
def embed_row(tiles, form, tile_bytes, token, size, scale, out):  # type: ignore[no-untyped-def]
    """out[0:size] = row `token` of a held weight, times `scale`."""
    groups = size // GROUP
    column = tiles + token // LANES * groups * tile_bytes
    lane = token % LANES
    target = floats(out, size)
    for group in range(groups):
        tile = column + group * tile_bytes
        if form == PLAIN:
            for i in range(GROUP):
                place = tile + i // 2 * 64 + lane * 4 + i % 2 * 2
                target[group * GROUP + i] = bf16_at(place) * scale
            continue
        end = 256 if form == NIBBLES else 512
        factor = half_at(tile + end + 2 * lane)
        second = np.float32(0.0)
        if form != BYTES_SIGNED:
            second = half_at(tile + end + 32 + 2 * lane)
        for i in range(GROUP):
            if form == NIBBLES:
                packed = byte_at(tile + i // 8 * 64 + lane * 4 + i % 4)
                code = (packed >> (4 * (i // 4 % 2))) & 15
            else:
                code = byte_at(tile + i // 4 * 64 + lane * 4 + i % 4)
            if form == BYTES_SIGNED:
                value = np.float32(code - 128) * factor
            elif form == BYTES_IN_HALVES:
                value = np.float32(code - 128) * (factor if i < 16 else second)
            else:
                value = np.float32(code) * factor + second
            target[group * GROUP + i] = value * scale


@fast_kernel
def rotate_row(x, cosines, sines, half, num_heads, head_dim):  # type: ignore[no-untyped-def]
    """Rotate every head of a row in place: element i pairs with i + half."""
    for head in range(num_heads):
        row = floats(x + head * head_dim * 4, head_dim)
        for i in range(half):
            low, high = row[i], row[half + i]
            row[i] = low * cosines[i] - high * sines[i]
            row[half + i] = high * cosines[i] + low * sines[i]
