"""Rows of numbers in memory: every kernel reads a row into f32, computes, and writes a row back.

A row is an address and a format, so one compiled kernel serves every dtype and every row stride.
All sums run in a fixed order over one row: no result depends on the other rows of a batch.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_vector import as_pointer, bits_of_float, float_of_bits

F32 = 0
BF16 = 1
F16 = 2

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number
_F16_SCALE = np.float32(2.0**112)


@kernel()
def floats(address, count):  # type: ignore[no-untyped-def]
    """View memory as f32 [count]."""
    return carray(as_pointer(address), (count,), np.float32)


@kernel()
def address_of(array):  # type: ignore[no-untyped-def]
    """The address of an array's first element, signed like all others."""
    return np.int64(array.ctypes.data)


@kernel()
def halves(address, count):  # type: ignore[no-untyped-def]
    """View memory as u2 [count]."""
    return carray(as_pointer(address), (count,), np.uint16)


@kernel()
def ints(address, count):  # type: ignore[no-untyped-def]
    """View memory as i4 [count]."""
    return carray(as_pointer(address), (count,), np.int32)


@kernel()
def longs(address, count):  # type: ignore[no-untyped-def]
    """View memory as i8 [count]."""
    return carray(as_pointer(address), (count,), np.int64)


@kernel()
def exp32(x):  # type: ignore[no-untyped-def]
    """e**x in f32 within 2 units in the last place; 0 below -87, and x above 88 is taken as 88."""
    y = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = (y * _LOG2_E + _ROUND) - _ROUND
    r = y - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    power = float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return np.float32(0.0) if x < np.float32(-87.0) else p * power


@kernel()
def tanh32(x):  # type: ignore[no-untyped-def]
    """tanh in f32, absolute error 2e-7."""
    return np.float32(1.0) - np.float32(2.0) / (exp32(np.float32(2.0) * x) + np.float32(1.0))


@kernel()
def row_size(row_format):  # type: ignore[no-untyped-def]
    """Bytes of one element."""
    return 4 if row_format == F32 else 2


@kernel()
def load_row(address, row_format, count, out):  # type: ignore[no-untyped-def]
    """out[0:count] f32 = the row at `address`."""
    if row_format == F32:
        source = floats(address, count)
        for i in range(count):
            out[i] = source[i]
    elif row_format == BF16:
        packed = halves(address, count)
        for i in range(count):
            out[i] = float_of_bits(np.int32(np.int32(packed[i]) << np.int32(16)))
    else:
        packed = halves(address, count)
        for i in range(count):
            half = np.int32(packed[i])
            magnitude = np.int32((half & np.int32(0x7FFF)) << np.int32(13))
            value = float_of_bits(magnitude) * _F16_SCALE
            if half & np.int32(0x7C00) == np.int32(0x7C00):
                value = float_of_bits(np.int32(magnitude | np.int32(0x7F800000)))
            out[i] = -value if half & np.int32(0x8000) else value


@kernel()
def bf16_of(value):  # type: ignore[no-untyped-def]
    """Round to bf16, to even; NaN stays NaN."""
    bits = bits_of_float(value)
    odd = np.int32((bits >> np.int32(16)) & np.int32(1))
    rounded = np.int32(bits + np.int32(0x7FFF) + odd)
    if value != value:
        rounded = np.int32(0x7FC00000)
    return np.uint16((rounded >> np.int32(16)) & np.int32(0xFFFF))


@kernel()
def f16_of(value):  # type: ignore[no-untyped-def]
    """Round to f16, to even; what is too large becomes the largest, NaN stays NaN."""
    bits = bits_of_float(value)
    sign = np.int32((bits >> np.int32(16)) & np.int32(0x8000))
    magnitude = float_of_bits(np.int32(bits & np.int32(0x7FFFFFFF)))
    if value != value:
        return np.uint16(0x7E00)
    magnitude = min(magnitude, np.float32(65504.0))
    if magnitude < np.float32(2.0**-14):
        subnormal = np.int32(bits_of_float(magnitude + np.float32(0.5)) - np.int32(0x3F000000))
        return np.uint16(sign | subnormal)
    inner = bits_of_float(magnitude)
    odd = np.int32((inner >> np.int32(13)) & np.int32(1))
    inner = np.int32(inner + np.int32(0x0FFF) + odd - np.int32(112 << 23))
    return np.uint16(sign | np.int32(inner >> np.int32(13)))


@kernel()
def store_row(source, address, row_format, count):  # type: ignore[no-untyped-def]
    """The row at `address` = source[0:count] f32, rounded."""
    if row_format == F32:
        target = floats(address, count)
        for i in range(count):
            target[i] = source[i]
    elif row_format == BF16:
        packed = halves(address, count)
        for i in range(count):
            packed[i] = bf16_of(source[i])
    else:
        packed = halves(address, count)
        for i in range(count):
            packed[i] = f16_of(source[i])
