"""Writes LLVM code from Python, so that a Numba kernel can hold instructions that Numba cannot name.

A routine is a function that takes an `Emitter` and LLVM values; `routine` makes it callable from
kernels. Everything is 16 lanes wide and LLVM splits that where the CPU has less, so only dot
products differ by level. Addresses are int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.kernels_vector import magnitude_bits

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, VOID = ir.HalfType(), ir.FloatType(), ir.VoidType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
INTS8, SHORTS16, BYTES32 = (ir.VectorType(kind, 256 // kind.width) for kind in (I32, I16, I8))
"""What a register of AVX2 holds."""


class BrainType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BrainType)

    def __hash__(self) -> int:
        return hash(BrainType)


BRAINS = ir.VectorType(BrainType(), LANES)
BRAIN_PAIRS = ir.VectorType(BrainType(), 2 * LANES)
BYTES, SHORTS = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)
LEVEL = capability.level()
binding.initialize_native_asmparser()  # for `dot_here`
DOT_SHIFTS_SIGNED = capability.AVX2 != LEVEL
"""Whether `Emitter.dot` of codes w + 128 gives sum((w + 128) * x), so that 128 * sum(x) must come off."""
HAS_TWO_PORTS = capability.has_two_ports()
HAS_BRAIN_DOT = capability.has_brain_dot()
HAS_BYTE_FIELD = capability.has_byte_field()
"""Whether there is GFNI, which multiplies bytes; by powers of two without a carry that is a shift of each."""

_KINDS = {"int": types.int64, "float": types.float32, "none": types.void}


def routine(
    returns: str = "none", floats: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Make a generator of LLVM code callable from kernels; arguments are int64 but for `floats`."""

    def decorate(generate: Callable[..., Any]) -> Any:
        names = list(inspect.signature(generate).parameters)[1:]
        kinds = [types.float32 if name in floats else types.int64 for name in names]
        signature = _KINDS[returns](*kinds)

        def lower(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            result = generate(Emitter(builder), *arguments)
            return context.get_dummy_value() if returns == "none" else result

        def definition(typing_context: Any, *_: Any) -> Any:
            return signature, lower

        definition.__name__ = generate.__name__
        definition.__doc__ = generate.__doc__
        definition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("typing_context", *names)
            ]
        )
        return intrinsic(definition)

    return decorate


class Emitter:
    """Short names for the code that every routine needs."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    # --- addresses and memory ---------------------------------------------------

    def add(self, address: Any, offset: Any) -> Any:
        return self.builder.add(address, self.integer(offset) if _is_plain(offset) else offset)

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, self.integer(factor))

    def integer(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def opaque(self, value: Any) -> Any:
        """The same int64 or vector, but LLVM does not know it: nothing that follows from it leaves a loop."""
        kind = ir.FunctionType(value.type, [value.type])
        constraint = "=r,0" if value.type == I64 else "=x,0"
        return self.builder.asm(kind, "", constraint, [value], side_effect=True)

    def pointer(self, address: Any, kind: Any, offset: Any = 0) -> Any:
        return self.builder.inttoptr(self.add(address, offset), kind.as_pointer())

    def load(self, address: Any, kind: Any = FLOATS, offset: Any = 0) -> Any:
        return self.builder.load(self.pointer(address, kind, offset), align=1)

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        self.builder.store(value, self.pointer(address, value.type, offset), align=1)

    def load_halves(self, address: Any, offset: Any = 0, lanes: int = LANES) -> Any:
        """f16 as f32."""
        halves = self.load(address, ir.VectorType(F16, lanes), offset)
        return self.builder.fpext(halves, ir.VectorType(F32, lanes))

    def variable(self, value: Any) -> Any:
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def get(self, slot: Any) -> Any:
        return self.builder.load(slot)

    def set(self, slot: Any, value: Any) -> None:
        self.builder.store(value, slot)

    def loop(self, count: Any) -> Any:
        """Context manager; `.index` of what it gives counts from 0."""
        return cgutils.for_range(self.builder, count)

    def prefetch(self, address: Any, offset: int = 0, *, locality: int = 3) -> None:
        """Ask for a line: 3, into the first-level cache; 2, into the second."""
        flags = [ir.Constant(I32, flag) for flag in (0, locality, 1)]
        self.call("llvm.prefetch.p0", VOID, self.pointer(address, I8, offset), *flags)

    # --- vectors ----------------------------------------------------------------

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def fill(self, value: float, kind: Any = FLOATS) -> Any:
        """The same number in every lane."""
        return ir.Constant(kind, [value] * kind.count)

    def broadcast(self, scalar: Any, lanes: int = LANES) -> Any:
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        vector = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(
            vector, empty, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        )

    def pick(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        """Some lanes of x, and of y counted behind them."""
        kind = ir.VectorType(I32, len(lanes))
        return self.builder.shuffle_vector(x, y, ir.Constant(kind, list(lanes)))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call(f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)

    def round(self, x: Any) -> Any:
        return self.call("llvm.rint.v16f32", FLOATS, x)

    def to_int(self, x: Any) -> Any:
        """16 f32 as i32, rounded to even; AVX-512 does both at once."""
        if LEVEL != capability.AVX512_VNNI:
            return self.builder.fptosi(self.round(x), INTS)
        name, mask, as_told = "llvm.x86.avx512.mask.cvtps2dq.512", ir.Constant(I16, -1), I32(4)
        return self.call(name, INTS, x, self.fill(0, INTS), mask, as_told)

    def widen_low(self, pairs: Any) -> Any:
        """The even bf16 of pairs as f32."""
        shifted = self.builder.shl(pairs, self.fill(16, pairs.type))
        return self.builder.bitcast(shifted, ir.VectorType(F32, pairs.type.count))

    def widen_high(self, pairs: Any) -> Any:
        """The odd bf16 of pairs as f32."""
        kept = self.builder.and_(pairs, self.fill(-65536, pairs.type))
        return self.builder.bitcast(kept, ir.VectorType(F32, pairs.type.count))

    def narrow(self, x: Any) -> Any:
        """16 f32 as bf16, rounded to even; HAS_BRAIN_DOT only: elsewhere LLVM would call a library."""
        return self.builder.fptrunc(x, BRAINS)

    def sum_lanes(self, x: Any) -> Any:
        return self._fold(x, self.builder.fadd)

    def sum_int_lanes(self, x: Any) -> Any:
        return self.call("llvm.vector.reduce.add.v16i32", I32, x)

    def max_int_lanes(self, x: Any) -> Any:
        return self.call("llvm.vector.reduce.smax.v16i32", I32, x)

    def magnitude_bits(self, x: Any) -> Any:
        """The bits of 16 |x|, in the order of the numbers; a NaN is larger than all of them."""
        return magnitude_bits(self.builder, x)

    def largest_magnitude(self, bits: Any) -> Any:
        """The largest lane of magnitude_bits as an f32 scalar, at least 1e-30."""
        largest, tiny = self.builder.bitcast(self.max_int_lanes(bits), F32), F32(1e-30)
        is_less = self.builder.fcmp_ordered("<", largest, tiny)
        return self.builder.select(is_less, tiny, largest)

    def split_bytes(self, code: Any) -> tuple[Any, Any]:
        """High and low bytes of 16 whole numbers of 15 bits, both from -127 on: -128 has no negative."""
        builder = self.builder
        high = builder.ashr(builder.add(code, self.fill(128, INTS)), self.fill(8, INTS))
        low = builder.sub(code, builder.shl(high, self.fill(8, INTS)))
        return high, self.call("llvm.smax.v16i32", INTS, low, self.fill(-127, INTS))

    def _fold(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Return a scalar: lanes are combined in a fixed tree."""
        for width in (8, 4, 2, 1):
            lanes = ir.Constant(INTS, [lane ^ width for lane in range(LANES)])
            x = combine(x, self.builder.shuffle_vector(x, x, lanes))
        return self.builder.extract_element(x, ir.Constant(I32, 0))

    def exp(self, x: Any) -> Any:
        """e**x within 2 units in the last place for -87 <= x <= 88, else the value at that bound; or NaN."""
        builder, low, high = self.builder, self.fill(-87.0), self.fill(88.0)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        whole = self.to_int(builder.fmul(x, self.fill(1.4426950408889634)))
        n = builder.sitofp(whole, FLOATS)
        r = self.fma(n, self.fill(-0.693359375), x)
        r = self.fma(n, self.fill(2.12194440e-4), r)
        return self._scaled(whole, r, (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))

    def exp2(self, x: Any) -> Any:
        """2**x within 3e-6 of the value for -100 <= x <= 127; 0 for less, NaN for NaN.

        Less, times a scale, would become numbers without a leading one, which take 100 times as long.
        """
        is_low = self.builder.fcmp_ordered("<", x, self.fill(-100.0))
        x = self.builder.select(is_low, self.fill(0.0), x)
        whole = self.to_int(x)
        r = self.builder.fsub(x, self.builder.sitofp(whole, FLOATS))
        coefficients = (0.00958285, 0.05590643, 0.24024099, 0.6931242, 1.0)
        return self.builder.select(is_low, self.fill(0.0), self._scaled(whole, r, coefficients))

    def _scaled(self, n: Any, r: Any, coefficients: Sequence[float]) -> Any:
        """2**n, for whole numbers n, times a polynomial of r, the highest power first."""
        builder, p = self.builder, self.fill(coefficients[0])
        for coefficient in coefficients[1:]:
            p = self.fma(p, r, self.fill(coefficient))
        exponent = builder.shl(n, self.fill(23, INTS))
        return builder.bitcast(builder.add(builder.bitcast(p, INTS), exponent), FLOATS)

    def tanh(self, x: Any) -> Any:
        """tanh with an absolute error of 2e-7."""
        builder, one = self.builder, self.fill(1.0)
        size = self.call("llvm.fabs.v16f32", FLOATS, x)
        e = self.exp(builder.fmul(size, self.fill(-2.0)))
        ratio = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
        return self.call("llvm.copysign.v16f32", FLOATS, ratio, x)

    # --- what differs by level --------------------------------------------------

    def dot(self, total: Any, codes: Any, x: Any, *, is_signed: bool) -> Any:
        """total[i] += the sum over 4 bytes of codes (unsigned) times x (signed), per 32-bit lane.

        `is_signed`: codes hold w + 128. Without DOT_SHIFTS_SIGNED the sum is of w * x then.
        """
        if LEVEL == capability.AVX512_VNNI:
            kind = ir.VectorType(I8, 4 * LANES)
            codes, x = self.builder.bitcast(codes, kind), self.builder.bitcast(x, kind)
            return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, codes, x)
        if LEVEL == capability.AVX2:
            return self._dot_avx2(total, codes, x, is_signed=is_signed)
        for byte in range(4):
            code = self.builder.lshr(codes, self.fill(8 * byte, INTS))
            code = self.builder.and_(code, self.fill(255, INTS))
            value = self.builder.shl(x, self.fill(24 - 8 * byte, INTS))
            value = self.builder.ashr(value, self.fill(24, INTS))
            total = self.builder.add(total, self.builder.mul(code, value))
        return total

    def dot_here(self, total: Any, codes: Any, x: Any, offset: int) -> Any:
        """`dot` of codes with the 4 bytes `offset` behind the address `x`; AVX512_VNNI only.

        It stays where it is among others like it: LLVM takes sums one after the other, to need fewer registers,
        and each product then waits for the one before. The address is one register: with two, the reading would
        take a place of its own beside the product on Intel.
        """
        kind = ir.FunctionType(INTS, [INTS, INTS, I64])
        text = f"vpdpbusd {offset}($3){{1to16}}, $2, $0"
        return self.builder.asm(
            kind, text, "=v,0,v,r,~{memory}", [total, codes, x], side_effect=True
        )

    def join_bytes(self, codes: Sequence[Any]) -> Any:
        """4 x 16 i32 that fit i8 as 64 of those, in order; AVX512_VNNI only."""
        shorts, joined = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)
        halves = [
            self.call("llvm.x86.avx512.packssdw.512", shorts, *codes[first : first + 2])
            for first in (0, 2)
        ]
        mixed = self.call("llvm.x86.avx512.packsswb.512", joined, *halves)  # every 128 bits apart
        order = [4 * block + vector for vector in range(4) for block in range(4)]
        mixed = self.builder.bitcast(mixed, INTS)
        return self.builder.bitcast(self.pick(mixed, mixed, order), joined)

    def dot_few(self, codes: Any, x: Any) -> Any:
        """The sum of 16 products of bytes, unsigned and signed; AVX512_VNNI only."""
        four = ir.VectorType(I32, 4)
        name, zero = "llvm.x86.avx512.vpdpbusd.128", self.fill(0, four)
        return self.call("llvm.vector.reduce.add.v4i32", I32, self.call(name, four, zero, codes, x))

    def times_powers(self, codes: Any, factors: Any) -> Any:
        """Bytes times powers of two that leave each below 256."""
        kind = ir.VectorType(I8, 4 * LANES)
        codes, factors = (self.builder.bitcast(value, kind) for value in (codes, factors))
        if HAS_BYTE_FIELD:
            codes = self.call("llvm.x86.vgf2p8mulb.512", kind, codes, factors)
        else:
            codes = self.builder.mul(codes, factors)
        return self.builder.bitcast(codes, INTS)

    def high_nibbles(self, packed: Any) -> Any:
        """The upper 4 bits of every byte; with GFNI in one instruction, a matrix that moves them down.

        Only where arithmetic has two ports: AMD shifts and masks on others than it multiplies on.
        """
        if not (HAS_TWO_PORTS and HAS_BYTE_FIELD):
            code = self.builder.lshr(packed, self.fill(4, packed.type))
            return self.builder.and_(code, self.fill(0x0F0F0F0F, packed.type))
        kind = ir.VectorType(I8, 4 * LANES)
        matrix = ir.Constant(kind, [0, 0, 0, 0, 0x80, 0x40, 0x20, 0x10] * 8)
        packed = self.builder.bitcast(packed, kind)
        name = "llvm.x86.vgf2p8affineqb.512"
        return self.builder.bitcast(self.call(name, kind, packed, matrix, I8(0)), INTS)

    def dot_brain(self, total: Any, pairs: Any, x: Any) -> Any:
        """total[i] += the two products of the bf16 in lane i of `pairs` and of `x`; HAS_BRAIN_DOT only."""
        pairs, x = (self.builder.bitcast(value, BRAIN_PAIRS) for value in (pairs, x))
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, pairs, x)

    def _dot_avx2(self, total: Any, codes: Any, x: Any, *, is_signed: bool) -> Any:
        """The products of two bytes must fit 16 bits, so signs move to x."""
        if total.type.count == LANES:
            halves = []
            for first in (0, 8):
                lanes = ir.Constant(INTS8, list(range(first, first + 8)))
                parts = [self.builder.shuffle_vector(v, v, lanes) for v in (total, codes, x)]
                halves.append(self._dot_avx2(*parts, is_signed=is_signed))
            return self.builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(LANES))))
        if is_signed:
            codes = self.builder.xor(codes, self.fill(-2139062144, INTS8))
            codes, x = self.builder.bitcast(codes, BYTES32), self.builder.bitcast(x, BYTES32)
            x = self.call("llvm.x86.avx2.psign.b", BYTES32, x, codes)
            codes = self.call("llvm.x86.avx2.psign.b", BYTES32, codes, codes)
        return self.dot_shorts(total, self.dot_bytes(codes, x), self.fill(1, SHORTS16))

    def dot_bytes(self, codes: Any, x: Any) -> Any:
        """Sums over 2 bytes of codes (unsigned) times x (signed), in 16 lanes of 16 bits; AVX2 only."""
        codes, x = self.builder.bitcast(codes, BYTES32), self.builder.bitcast(x, BYTES32)
        return self.call("llvm.x86.avx2.pmadd.ub.sw", SHORTS16, codes, x)

    def dot_shorts(self, total: Any, codes: Any, x: Any) -> Any:
        """total[i] += the two products of signed 16-bit numbers in lane i of 8; AVX2 only."""
        codes, x = self.builder.bitcast(codes, SHORTS16), self.builder.bitcast(x, SHORTS16)
        return self.builder.add(total, self.call("llvm.x86.avx2.pmadd.wd", INTS8, codes, x))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int)
