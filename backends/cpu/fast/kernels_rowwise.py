"""What is done to one row of activations: norms, gates, embedding, rotation.

Rows are f32 at an address; sizes are multiples of 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    routine,
)
from headrace.backends.cpu.fast.kernels_coding import (
    GROUP,
)
from headrace.backends.cpu.fast.kernels_tiles import (
    BYTES_IN_HALVES,
    BYTES_SIGNED,
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
    """In four sums, which do not wait for each other."""
    totals = [e.variable(e.fill(0.0)) for _ in range(4)]

    def add(total: Any, place: Any) -> None:
        value = e.load(place)
        e.set(total, e.fma(value, value, e.get(total)))

    vectors = e.builder.sdiv(size, e.integer(LANES))
    whole = e.builder.sdiv(vectors, e.integer(4))
    with e.loop(whole) as loop:
        place = e.add(x, e.times(loop.index, 4 * _ROW))
        for number, total in enumerate(totals):
            add(total, e.add(place, number * _ROW))
    with e.loop(e.builder.srem(vectors, e.integer(4))) as loop:
        add(totals[0], e.add(x, e.times(e.add(e.times(whole, 4), loop.index), _ROW)))
    low, high = (e.builder.fadd(e.get(totals[i]), e.get(totals[i + 2])) for i in (0, 1))
    return e.sum_lanes(e.builder.fadd(low, high))


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
