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
_CHAINS = 4
"""Vectors that a search keeps apart, so that none waits for the one before it."""
_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)


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


def _lanes(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _whole_lanes(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * LANES)


def _exp(builder: Any, x: Any) -> Any:
    """e**x for x <= 0, 0 below -87: the same polynomial as kernels_rows.exp32."""
    y = _call(builder, "llvm.maxnum.v16f32", _VECTOR, [x, _lanes(-87.0)])
    rounding = _lanes(12582912.0)
    n = builder.fsub(_fma(builder, y, _lanes(1.4426950408889634), rounding), rounding)
    r = _fma(builder, n, _lanes(-0.693359375), y)
    r = _fma(builder, n, _lanes(2.12194440e-4), r)
    p = _lanes(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = _fma(builder, p, r, _lanes(coefficient))
    exponent = builder.add(builder.fptosi(n, _INTEGERS), _whole_lanes(127))
    power = builder.bitcast(builder.shl(exponent, _whole_lanes(23)), _VECTOR)
    is_small = builder.fcmp_ordered("<", x, _lanes(-87.0))
    return builder.select(is_small, _lanes(0.0), builder.fmul(p, power))


def _tanh(builder: Any, x: Any) -> Any:
    """tanh with an absolute error of 2e-7: (1 - e) / (1 + e) with e = e**(-2|x|), and x's sign."""
    size = _call(builder, "llvm.fabs.v16f32", _VECTOR, [x])
    e = _exp(builder, builder.fmul(size, _lanes(-2.0)))
    ratio = builder.fdiv(builder.fsub(_lanes(1.0), e), builder.fadd(_lanes(1.0), e))
    return _call(builder, "llvm.copysign.v16f32", _VECTOR, [ratio, x])


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return a vector with the combination of all lanes in every lane."""
    for width in (8, 4, 2, 1):
        other = _shuffle(builder, vector, vector, [lane ^ width for lane in range(LANES)])
        vector = combine(vector, other)
    return vector


def _dot_rows(builder: Any, x: Any, rows: Any, stride: Any, count: Any) -> Any:
    """Return the vector whose lane i is the dot product of x and row i."""
    sums = [_variable(builder, _lanes(0.0)) for _ in range(LANES)]
    starts = [builder.add(rows, builder.mul(stride, _const(i))) for i in range(LANES)]
    with cgutils.for_range(builder, builder.sdiv(count, _const(LANES))) as loop:
        offset = builder.mul(loop.index, _const(4 * LANES))
        value = _load(builder, x, offset)
        for total, start in zip(sums, starts, strict=True):
            row = _load(builder, start, offset)
            builder.store(_fma(builder, value, row, builder.load(total)), total)
    return _sum_lanes_of_each(builder, [builder.load(total) for total in sums])


@intrinsic  # type: ignore[untyped-decorator]
def dot16(typing_context: Any, x: Any, rows: Any, stride: Any, count: Any, out: Any) -> Any:
    """out[i] = sum over j < count of x[j] * row_i[j], for 16 rows f32 `stride` bytes apart.

    `count` is rounded down to a multiple of 16: the caller adds the rest.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *operands, out = arguments
        _store(builder, _dot_rows(builder, *operands), out, _const(0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _add_values(builder: Any, total: Any, fade: Any, weights: Any, values: Any, size: Any) -> None:
    """total[j] = fade * total[j] + sum over 16 rows of weights[i] * row_i[j]."""
    factors = [_shuffle(builder, weights, weights, [i] * LANES) for i in range(LANES)]
    row_bytes = builder.mul(size, _const(4))
    starts = [builder.add(values, builder.mul(row_bytes, _const(i))) for i in range(LANES)]
    with cgutils.for_range(builder, builder.sdiv(size, _const(LANES))) as loop:
        offset = builder.mul(loop.index, _const(4 * LANES))
        even = builder.fmul(_load(builder, total, offset), fade)
        odd = _lanes(0.0)
        for i in range(0, LANES, 2):
            even = _fma(builder, factors[i], _load(builder, starts[i], offset), even)
            odd = _fma(builder, factors[i + 1], _load(builder, starts[i + 1], offset), odd)
        _store(builder, builder.fadd(even, odd), total, offset)


def _score(builder: Any, arguments: Any) -> Any:
    """Return the scores of 16 rows: scaled, capped, biased, -inf outside first .. last."""
    query, keys, _, _, _, bias, first, last, scale, softcap, size = arguments
    row_bytes = builder.mul(size, _const(4))
    dots = _dot_rows(builder, query, keys, row_bytes, size)
    scores = _variable(builder, builder.fmul(dots, _broadcast(builder, scale)))
    with builder.if_then(builder.fcmp_ordered(">", softcap, ir.Constant(_F32, 0.0))):
        cap = _broadcast(builder, softcap)
        capped = _tanh(builder, builder.fdiv(builder.load(scores), cap))
        builder.store(builder.fmul(capped, cap), scores)
    with builder.if_then(builder.icmp_signed("!=", bias, _const(0))):
        biased = builder.fadd(builder.load(scores), _load(builder, bias, _const(0)))
        builder.store(biased, scores)
    lane = ir.Constant(_INTEGERS, list(range(LANES)))
    bounds = [
        _shuffle(
            builder,
            builder.insert_element(
                ir.Constant(_INTEGERS, ir.Undefined),
                builder.trunc(bound, _I32),
                ir.Constant(_I32, 0),
            ),
            ir.Constant(_INTEGERS, ir.Undefined),
            [0] * LANES,
        )
        for bound in (first, last)
    ]
    is_seen = builder.and_(
        builder.icmp_signed(">=", lane, bounds[0]), builder.icmp_signed("<", lane, bounds[1])
    )
    return builder.select(is_seen, builder.load(scores), _lanes(float("-inf")))


@intrinsic  # type: ignore[untyped-decorator]
def attend16(
    typing_context: Any, query: Any, keys: Any, values: Any, total: Any, state: Any, bias: Any,
    first: Any, last: Any, scale: Any, softcap: Any, size: Any,
) -> Any:  # fmt: skip
    """Take rows first .. last of 16 rows [16, size] f32 into one query's softmax.

    total [size] is the weighted sum of values so far, state the largest score and the sum of weights.
    `bias` [16] is added to the scores where its address is not 0. Hidden rows change nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, total, state, size = arguments[2], arguments[3], arguments[4], arguments[10]
        scores = _score(builder, arguments)

        def larger(x: Any, y: Any) -> Any:
            return _call(builder, "llvm.maxnum.v16f32", _VECTOR, [x, y])

        state_pointer = builder.inttoptr(state, _F32.as_pointer())
        sum_pointer = builder.inttoptr(builder.add(state, _const(4)), _F32.as_pointer())
        previous = _broadcast(builder, builder.load(state_pointer))
        best = larger(_fold(builder, scores, larger), previous)
        best_scalar = builder.extract_element(best, ir.Constant(_I32, 0))
        hidden = ir.Constant(_F32, float("-inf"))
        with builder.if_then(builder.fcmp_ordered(">", best_scalar, hidden)):
            weights = _exp(builder, builder.fsub(scores, best))
            fade = _exp(builder, builder.fsub(previous, best))
            added = builder.extract_element(
                _fold(builder, weights, builder.fadd), ir.Constant(_I32, 0)
            )
            kept = builder.fmul(
                builder.load(sum_pointer), builder.extract_element(fade, ir.Constant(_I32, 0))
            )
            builder.store(best_scalar, state_pointer)
            builder.store(builder.fadd(kept, added), sum_pointer)
            _add_values(builder, total, fade, weights, values, size)
        return context.get_dummy_value()

    floats = [types.float32] * 2
    return types.void(*[types.int64] * 8, *floats, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_bf16(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """target f32 = source bf16, `count` a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, count = arguments
        packed = ir.VectorType(ir.IntType(16), LANES)
        with cgutils.for_range(builder, builder.sdiv(count, _const(LANES))) as loop:
            address = builder.add(source, builder.mul(loop.index, _const(2 * LANES)))
            halves = builder.load(builder.inttoptr(address, packed.as_pointer()), align=2)
            bits = builder.shl(builder.zext(halves, _INTEGERS), _whole_lanes(16))
            offset = builder.mul(loop.index, _const(4 * LANES))
            _store(builder, builder.bitcast(bits, _VECTOR), target, offset)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for a cache line; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def magnitude_bits(builder: Any, x: Any) -> Any:
    """The bits of |x|, in the order of the numbers; a NaN's are above those of infinity."""
    return builder.and_(builder.bitcast(x, _INTEGERS), _whole_lanes(0x7FFFFFFF))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    """The larger of two floats or vectors; where one is NaN that is y: one instruction."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _most(builder: Any, x: Any, y: Any) -> Any:
    """The larger of each lane of whole numbers."""
    return _call(builder, "llvm.smax.v16i32", _INTEGERS, [x, y])


def _largest(typing_context: Any, values: Any, count: Any) -> Any:
    """Return the largest of `count` floats, NaN if one of them is; -inf where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count = arguments
        low = float("-inf")
        largest = [_variable(builder, _lanes(low)) for _ in range(_CHAINS)]
        magnitude = [_variable(builder, _whole_lanes(0)) for _ in range(_CHAINS)]

        def take(address: Any, chain: int) -> None:
            vector = _load(builder, address, _const(4 * LANES * chain))
            found = _larger(builder, vector, builder.load(largest[chain]))
            builder.store(found, largest[chain])
            bits = magnitude_bits(builder, vector)
            builder.store(_most(builder, bits, builder.load(magnitude[chain])), magnitude[chain])

        done: Any = _const(0)
        for size in (_CHAINS, 1):
            rounds = builder.sdiv(builder.sub(count, done), _const(LANES * size))
            with cgutils.for_range(builder, rounds) as loop:
                first = builder.add(done, builder.mul(loop.index, _const(LANES * size)))
                address = builder.add(values, builder.mul(first, _const(4)))
                for chain in range(size):
                    take(address, chain)
            done = builder.add(done, builder.mul(rounds, _const(LANES * size)))
        best, most = _lanes(low), _whole_lanes(0)
        for chain in range(_CHAINS):
            best = _larger(builder, builder.load(largest[chain]), best)
            most = _most(builder, builder.load(magnitude[chain]), most)
        best = _fold(builder, best, lambda x, y: _larger(builder, x, y))
        most = _call(builder, "llvm.vector.reduce.smax.v16i32", _I32, [most])
        is_none = builder.icmp_signed(">", most, ir.Constant(_I32, 0x7F800000))
        single = builder.extract_element(best, ir.Constant(_I32, 0))
        result = _variable(
            builder, builder.select(is_none, ir.Constant(_F32, float("nan")), single)
        )
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            offset = builder.mul(builder.add(done, loop.index), _const(4))
            pointer = builder.inttoptr(builder.add(values, offset), _F32.as_pointer())
            value, held = builder.load(pointer, align=4), builder.load(result)
            is_larger = builder.fcmp_unordered(">", value, held)  # or NaN, which stays
            is_kept = builder.fcmp_unordered("uno", held, held)
            builder.store(
                builder.select(is_kept, held, builder.select(is_larger, value, held)), result
            )
        return builder.load(result)

    return types.float32(types.int64, types.int64), generate


largest_of: Callable[[int, int], float] = intrinsic(_largest)
