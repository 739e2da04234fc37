"""Vectors of 16 floats for the kernels: what Numba's own loops do not reach, written as LLVM code.

All addresses are int64. The code is generic (LLVM splits 16 lanes into what the CPU has), and the
order of every sum is fixed, so that a result depends on the values alone, never on batch or threads.

`dot16` adds the 16 partial sums of each of 16 rows by a tree of shuffles. Versions tried, head size 64,
3 queries on 16 rows, relative time: plain Numba loop with a horizontal sum per row 1; this 0.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


def _load(builder: Any, address: Any, offset: Any) -> Any:
    pointer = builder.inttoptr(builder.add(address, offset), _VECTOR.as_pointer())
    return builder.load(pointer, align=4)


def _store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    pointer = builder.inttoptr(builder.add(address, offset), _VECTOR.as_pointer())
    builder.store(value, pointer, align=4)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _VECTOR, [x, y, z])


def _shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, LANES), lanes)
    return builder.shuffle_vector(x, y, mask)


def _broadcast(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    vector = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return _shuffle(builder, vector, undefined, [0] * LANES)


def _sum_lanes_of_each(builder: Any, vectors: list[Any]) -> Any:
    """Return the vector whose lane i is the sum of all lanes of vectors[i]."""
    width = 1
    while len(vectors) > 1:
        first, second = [], []
        for lane in range(LANES):
            run, within = divmod(lane, width)
            source = (run // 2) * 2 * width + within + LANES * (run % 2)
            first.append(source)
            second.append(source + width)
        vectors = [
            builder.fadd(_shuffle(builder, x, y, first), _shuffle(builder, x, y, second))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width *= 2
    return vectors[0]


def _variable(builder: Any, value: Any) -> Any:
    pointer = cgutils.alloca_once(builder, value.type)
    builder.store(value, pointer)
    return pointer


def _const(value: int) -> Any:
    return ir.Constant(_I64, value)


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Turn an address into what numba.carray takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Return the f32 whose bits an int32 holds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """Return the bits of an f32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def dot16(typing_context: Any, x: Any, rows: Any, stride: Any, count: Any, out: Any) -> Any:
    """out[i] = sum over j < count of x[j] * row_i[j], for 16 rows f32 `stride` bytes apart.

    `count` is rounded down to a multiple of 16: the caller adds the rest.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, rows, stride, count, out = arguments
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [_variable(builder, zero) for _ in range(LANES)]
        starts = [builder.add(rows, builder.mul(stride, _const(i))) for i in range(LANES)]
        with cgutils.for_range(builder, builder.sdiv(count, _const(LANES))) as loop:
            offset = builder.mul(loop.index, _const(4 * LANES))
            value = _load(builder, x, offset)
            for total, start in zip(sums, starts, strict=True):
                row = _load(builder, start, offset)
                builder.store(_fma(builder, value, row, builder.load(total)), total)
        totals = _sum_lanes_of_each(builder, [builder.load(total) for total in sums])
        _store(builder, totals, out, _const(0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def scale_and_add16(
    typing_context: Any, total: Any, scale: Any, weights: Any, rows: Any, stride: Any, count: Any
) -> Any:
    """total[j] = scale * total[j] + sum over 16 rows of weights[i] * row_i[j]; count is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, scale, weights, rows, stride, count = arguments
        factor = _broadcast(builder, scale)
        loaded = _load(builder, weights, _const(0))
        factors = [_shuffle(builder, loaded, loaded, [i] * LANES) for i in range(LANES)]
        starts = [builder.add(rows, builder.mul(stride, _const(i))) for i in range(LANES)]
        with cgutils.for_range(builder, builder.sdiv(count, _const(LANES))) as loop:
            offset = builder.mul(loop.index, _const(4 * LANES))
            even = builder.fmul(_load(builder, total, offset), factor)
            odd = ir.Constant(_VECTOR, [0.0] * LANES)
            for i in range(0, LANES, 2):
                even = _fma(builder, factors[i], _load(builder, starts[i], offset), even)
                odd = _fma(builder, factors[i + 1], _load(builder, starts[i + 1], offset), odd)
            _store(builder, builder.fadd(even, odd), total, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 4), generate


def _largest(typing_context: Any, values: Any, count: Any) -> Any:
    """Return the largest of `count` floats, NaN left out; -inf where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count = arguments
        low = float("-inf")
        largest = _variable(builder, ir.Constant(_VECTOR, [low] * LANES))
        whole = builder.sdiv(count, _const(LANES))
        with cgutils.for_range(builder, whole) as loop:
            vector = _load(builder, values, builder.mul(loop.index, _const(4 * LANES)))
            found = _call(builder, "llvm.maxnum.v16f32", _VECTOR, [vector, builder.load(largest)])
            builder.store(found, largest)
        best = _variable(builder, ir.Constant(_F32, low))
        done = builder.mul(whole, _const(LANES))
        for lane in range(LANES):
            value = builder.extract_element(builder.load(largest), ir.Constant(_I32, lane))
            builder.store(
                _call(builder, "llvm.maxnum.f32", _F32, [value, builder.load(best)]), best
            )
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            offset = builder.mul(builder.add(done, loop.index), _const(4))
            pointer = builder.inttoptr(builder.add(values, offset), _F32.as_pointer())
            value = builder.load(pointer, align=4)
            builder.store(
                _call(builder, "llvm.maxnum.f32", _F32, [value, builder.load(best)]), best
            )
        return builder.load(best)

    return types.float32(types.int64, types.int64), generate


largest_of: Callable[[int, int], float] = intrinsic(_largest)
