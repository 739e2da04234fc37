"""Loads, stores and unpacking of the storage formats, as device functions that are compiled in place."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.source import BF16, F16, F32, FP8, INT8

bf16_low, bf16_high = primitives.bf16_low, primitives.bf16_high
f16_low, f16_high = primitives.f16_low, primitives.f16_high
word_as_float, e4m3_pair = primitives.word_as_float, primitives.e4m3_pair
float_to_bf16, float_to_f16 = primitives.float_to_bf16, primitives.float_to_f16
u32, f32 = types.uint32, types.float32

device = cuda.jit(device=True, forceinline=True)

ELEMENTS = {F32: types.float32, BF16: types.uint16, F16: types.uint16}
"""The pointee of activations: 16-bit floats are their bits."""
E4M3_BY_SHIFT = 256.0
"""What the values of `unpack_e4m3_shifted` still lack as a factor."""


@device
def load_f32(array, index):  # type: ignore[no-untyped-def]
    return array[index]


@device
def load_bf16(array, index):  # type: ignore[no-untyped-def]
    return bf16_low(u32(array[index]))


@device
def load_f16(array, index):  # type: ignore[no-untyped-def]
    return f16_low(u32(array[index]))


@device
def store_f32(array, index, value):  # type: ignore[no-untyped-def]
    array[index] = f32(value)


@device
def store_bf16(array, index, value):  # type: ignore[no-untyped-def]
    array[index] = float_to_bf16(f32(value))


@device
def store_f16(array, index, value):  # type: ignore[no-untyped-def]
    array[index] = float_to_f16(f32(value))


@device
def unpack_f32(words, values):  # type: ignore[no-untyped-def]
    values[0], values[1] = word_as_float(words[0]), word_as_float(words[1])
    values[2], values[3] = word_as_float(words[2]), word_as_float(words[3])


@device
def unpack_bf16(words, values):  # type: ignore[no-untyped-def]
    values[0], values[1] = bf16_low(words[0]), bf16_high(words[0])
    values[2], values[3] = bf16_low(words[1]), bf16_high(words[1])
    values[4], values[5] = bf16_low(words[2]), bf16_high(words[2])
    values[6], values[7] = bf16_low(words[3]), bf16_high(words[3])


@device
def unpack_f16(words, values):  # type: ignore[no-untyped-def]
    values[0], values[1] = f16_low(words[0]), f16_high(words[0])
    values[2], values[3] = f16_low(words[1]), f16_high(words[1])
    values[4], values[5] = f16_low(words[2]), f16_high(words[2])
    values[6], values[7] = f16_low(words[3]), f16_high(words[3])


@device
def _two_pairs(word, values, at):  # type: ignore[no-untyped-def]
    first, second = e4m3_pair(u32(word)), e4m3_pair(u32(word) >> u32(16))
    values[at], values[at + 1] = f16_low(first), f16_high(first)
    values[at + 2], values[at + 3] = f16_low(second), f16_high(second)


@device
def unpack_e4m3(words, values):  # type: ignore[no-untyped-def]
    _two_pairs(words[0], values, 0)
    _two_pairs(words[1], values, 4)
    _two_pairs(words[2], values, 8)
    _two_pairs(words[3], values, 12)


@device
def _four_shifted(word, values, at):  # type: ignore[no-untyped-def]
    # as the bits of an f16 whose exponent is 8 too small; subnormals come out right
    even = (word & u32(0x00800080)) << u32(8) | (word & u32(0x007F007F)) << u32(7)
    odd = word & u32(0x80008000) | (word & u32(0x7F007F00)) >> u32(1)
    values[at], values[at + 1] = f16_low(even), f16_low(odd)
    values[at + 2], values[at + 3] = f16_high(even), f16_high(odd)


@device
def unpack_e4m3_shifted(words, values):  # type: ignore[no-untyped-def]
    """Values over 256, where the device has no conversion (before 8.9)."""
    _four_shifted(u32(words[0]), values, 0)
    _four_shifted(u32(words[1]), values, 4)
    _four_shifted(u32(words[2]), values, 8)
    _four_shifted(u32(words[3]), values, 12)


@device
def _four_codes(word, values, at):  # type: ignore[no-untyped-def]
    # 2 ** 23 + (code + 128) as an f32 has the code in its lowest byte
    flipped = u32(word) ^ u32(0x80808080)
    magic, offset = u32(0x4B000000), f32(8388736.0)
    values[at] = word_as_float(flipped & u32(255) | magic) - offset
    values[at + 1] = word_as_float(flipped >> u32(8) & u32(255) | magic) - offset
    values[at + 2] = word_as_float(flipped >> u32(16) & u32(255) | magic) - offset
    values[at + 3] = word_as_float(flipped >> u32(24) | magic) - offset


@device
def unpack_int8(words, values):  # type: ignore[no-untyped-def]
    _four_codes(words[0], values, 0)
    _four_codes(words[1], values, 4)
    _four_codes(words[2], values, 8)
    _four_codes(words[3], values, 12)


@device
def unpack_nibbles(words, values):  # type: ignore[no-untyped-def]
    """32 codes of 4 bits: 0-15 in the low halves of the bytes, 16-31 in the high ones."""
    for w in range(4):
        for byte in range(4):
            values[4 * w + byte] = f32(words[w] >> u32(8 * byte) & u32(15))
            values[16 + 4 * w + byte] = f32(words[w] >> u32(8 * byte + 4) & u32(15))


@device
def dot(a, at, b, count):  # type: ignore[no-untyped-def]
    """Sum of a[at + i] * b[i] over i < count, a constant."""
    total = f32(0.0)
    for i in range(count):
        total += a[at + i] * b[i]
    return total


@device
def add_scaled(target, at, scale, source, count):  # type: ignore[no-untyped-def]
    """target[at + i] += scale * source[i] for i < count, a constant."""
    for i in range(count):
        target[at + i] += scale * source[i]


@device
def multiply_all(target, at, factor, count):  # type: ignore[no-untyped-def]
    """target[at + i] *= factor for i < count, a constant."""
    for i in range(count):
        target[at + i] *= factor


STAND_INS = (
    "unpack_f32", "unpack_bf16", "unpack_f16", "unpack_e4m3", "unpack_e4m3_shifted", "unpack_int8",
    "unpack_nibbles", "dot", "add_scaled", "multiply_all",
)  # fmt: skip
"""What the simulator runs as one NumPy call each: a test holds both against each other."""
LOADS: dict[str, Any] = {F32: load_f32, BF16: load_bf16, F16: load_f16}
STORES: dict[str, Any] = {F32: store_f32, BF16: store_bf16, F16: store_f16}
UNPACKS: dict[str, Any] = {F32: unpack_f32, BF16: unpack_bf16, F16: unpack_f16, INT8: unpack_int8}


def unpack_of(kv: str, native_fp8: bool) -> tuple[Any, float]:
    """Return the device function that unpacks 16 bytes, and the factor its values lack."""
    if kv != FP8:
        return UNPACKS[kv], 1.0
    return (unpack_e4m3, 1.0) if native_fp8 else (unpack_e4m3_shifted, E4M3_BY_SHIFT)
