"""What Numba CUDA has no words for, as one intrinsic each: the only module with LLVM IR and PTX.

Every name in `NAMES` has its plain meaning in `headrace.testing.cuda_primitives`, which is what runs where
there is no device; keep a branch of PTX to one instruction, since only a device executes it. Numba's own types
never give 16-byte accesses, and numba-cuda's bfloat16 goes through calls and local memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

NAMES = (
    "load_words", "load_words_once", "load_transposed", "copy_words", "copy_word", "commit_copies",
    "wait_copies", "atomic_add", "word_as_float", "float_as_word", "bf16_low", "bf16_high", "f16_low",
    "f16_high", "e4m3_pair", "float_to_bf16", "float_to_f16", "float_to_e4m3", "round_even", "exp2_fast",
    "log2_fast", "reciprocal_fast", "inverse_root_fast", "multiply_high", "mma_bf16", "mma_f16",
    "pack_bf16", "pack_f16",
)  # fmt: skip

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_WORDS = ir.LiteralStructType([_I32] * 4)
_FLOATS = ir.LiteralStructType([_F32] * 4)
f32, u32, i32, u16 = types.float32, types.uint32, types.int32, types.uint16


def _address(context: Any, builder: Any, sig: Any, args: Any, at: int) -> Any:
    """The address of element args[at + 1] of the pointer or array args[at]."""
    array_type, index_type = sig.args[at], sig.args[at + 1]
    if isinstance(array_type, types.CPointer):
        data = args[at]
    else:
        data = context.make_array(array_type)(context, builder, value=args[at]).data
    return builder.gep(data, [context.cast(builder, args[at + 1], index_type, types.intp)])


def _asm(
    builder: Any, text: str, constraints: str, result: Any, args: Any, effects: bool = False
) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=effects), args)


def _unary(result: Any, argument: Any, body: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def made(typing_context, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return body(builder, args[0])

        return result(argument), codegen

    return made


def _loader(once: bool) -> Any:
    @intrinsic
    def made(typing_context, array, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            pointer = _address(context, builder, sig, args, 0)
            if once:
                text = "ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];"
                loaded = _asm(builder, text, "=r,=r,=r,=r,l", _WORDS, [pointer])
                words = [builder.extract_value(loaded, k) for k in range(4)]
            else:
                wide = builder.bitcast(pointer, ir.VectorType(_I32, 4).as_pointer())
                loaded = builder.load(wide, align=16)
                words = [builder.extract_element(loaded, _I32(k)) for k in range(4)]
            return context.make_tuple(builder, sig.return_type, words)

        return types.UniTuple(u32, 4)(array, index), codegen

    return made


load_words = _loader(once=False)
"""Four u32 words from a 16-byte aligned place in shared or global memory."""
load_words_once = _loader(once=True)
"""The same from global memory that is read once: it leaves L1 to others."""


@intrinsic
def load_transposed(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Four 8 x 8 matrices of 16-bit elements from shared memory, transposed, by a whole warp.

    Lane 8 m + r names row r of matrix m, 16 bytes; lane l gets of each matrix the elements of column
    l // 4 in rows 2 (l % 4) and the next.
    """

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        at = builder.ptrtoint(_address(context, builder, sig, args, 0), _I64)
        text = (
            "{ .reg .u64 a; .reg .u32 b; cvta.to.shared.u64 a, $4; cvt.u32.u64 b, a; "
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [b]; }"
        )
        loaded = _asm(builder, text, "=r,=r,=r,=r,l,~{memory}", _WORDS, [at], effects=True)
        words = [builder.extract_value(loaded, k) for k in range(4)]
        return context.make_tuple(builder, sig.return_type, words)

    return types.UniTuple(u32, 4)(array, index), codegen


@intrinsic
def atomic_add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Add to an integer in shared or global memory as one step; return what it was."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = _address(context, builder, sig, args, 0)
        return builder.atomic_rmw("add", pointer, args[2], "monotonic")

    return array.dtype(array, index, array.dtype), codegen


def _copier(operation: str) -> Any:
    @intrinsic
    def made(typing_context, target, target_index, source, source_index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            to = builder.ptrtoint(_address(context, builder, sig, args, 0), _I64)
            origin = builder.ptrtoint(_address(context, builder, sig, args, 2), _I64)
            text = (
                "{ .reg .u64 a; .reg .u32 b; cvta.to.shared.u64 a, $0; cvt.u32.u64 b, a; "
                + operation
                + " }"
            )
            _asm(builder, text, "l,l,~{memory}", ir.VoidType(), [to, origin], effects=True)
            return context.get_dummy_value()

        return types.void(target, target_index, source, source_index), codegen

    return made


copy_words = _copier("cp.async.cg.shared.global.L2::128B [b], [$1], 16;")
"""Start copying 16 bytes from global to shared memory; they may be read after wait_copies."""
copy_word = _copier("cp.async.ca.shared.global [b], [$1], 4;")
"""Start copying 4 bytes."""


@intrinsic
def commit_copies(typing_context):  # type: ignore[no-untyped-def]
    """Make this thread's copies since the last commit one group."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        _asm(builder, "cp.async.commit_group;", "~{memory}", ir.VoidType(), [], effects=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def wait_copies(typing_context, newest):  # type: ignore[no-untyped-def]
    """Wait for all groups of this thread but the `newest`, a constant."""
    if not isinstance(newest, types.IntegerLiteral):
        return None
    count = newest.literal_value

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        text = f"cp.async.wait_group {count};"
        _asm(builder, text, "~{memory}", ir.VoidType(), [], effects=True)
        return context.get_dummy_value()

    return types.void(newest), codegen


word_as_float = _unary(f32, u32, lambda builder, value: builder.bitcast(value, _F32))
float_as_word = _unary(u32, f32, lambda builder, value: builder.bitcast(value, _I32))
bf16_low = _unary(f32, u32, lambda b, value: b.bitcast(b.shl(value, _I32(16)), _F32))
"""The f32 value of the bf16 in the low half of a word."""
bf16_high = _unary(f32, u32, lambda b, value: b.bitcast(b.and_(value, _I32(0xFFFF0000)), _F32))


def _half(builder: Any, value: Any) -> Any:
    half = builder.bitcast(builder.trunc(value, _I16), ir.HalfType())
    return builder.fpext(half, _F32)


f16_low = _unary(f32, u32, _half)
f16_high = _unary(f32, u32, lambda builder, value: _half(builder, builder.lshr(value, _I32(16))))
e4m3_pair = _unary(
    u32,
    u32,
    lambda b, value: _asm(b, "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", _I32, [b.trunc(value, _I16)]),
)
"""Two e4m3 in the low half of a word to two f16 (compute capability 8.9 and above)."""
float_to_bf16 = _unary(
    u16, f32, lambda builder, value: _asm(builder, "cvt.rn.bf16.f32 $0, $1;", "=h,f", _I16, [value])
)
float_to_f16 = _unary(
    u16, f32, lambda builder, value: _asm(builder, "cvt.rn.f16.f32 $0, $1;", "=h,f", _I16, [value])
)
round_even = _unary(
    i32, f32, lambda builder, value: _asm(builder, "cvt.rni.s32.f32 $0, $1;", "=r,f", _I32, [value])
)
"""The nearest integer, ties to even."""
exp2_fast = _unary(
    f32,
    f32,
    lambda builder, value: _asm(builder, "ex2.approx.ftz.f32 $0, $1;", "=f,f", _F32, [value]),
)
"""2 ** x to 2 units in the last place; what is below 2 ** -126 is 0."""
log2_fast = _unary(
    f32,
    f32,
    lambda builder, value: _asm(builder, "lg2.approx.ftz.f32 $0, $1;", "=f,f", _F32, [value]),
)
"""log2(x) within 2 ** -22 of the absolute value near 1."""

reciprocal_fast = _unary(
    f32,
    f32,
    lambda builder, value: _asm(builder, "rcp.approx.ftz.f32 $0, $1;", "=f,f", _F32, [value]),
)
"""1 / x to 1 unit in the last place; division itself is a call."""

inverse_root_fast = _unary(
    f32,
    f32,
    lambda builder, value: _asm(builder, "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", _F32, [value]),
)
"""1 / sqrt(x) to 1 unit in the last place or so."""


def _e4m3(builder: Any, value: Any) -> Any:
    zero = ir.Constant(_F32, 0.0)
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    return _asm(builder, text, "=h,f,f", _I16, [zero, value])


float_to_e4m3 = _unary(u16, f32, _e4m3)
"""The nearest e4m3 (8.9 and above), saturated at 448; the upper byte is 0."""


@intrinsic
def multiply_high(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The upper 32 bits of a product of two u32."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        wide = builder.mul(builder.zext(args[0], _I64), builder.zext(args[1], _I64))
        return builder.trunc(builder.lshr(wide, _I64(32)), _I32)

    return u32(u32, u32), codegen


def _packer(kind: str) -> Any:
    @intrinsic
    def made(typing_context, low, high):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            text = f"cvt.rn.{kind}x2.f32 $0, $1, $2;"
            return _asm(builder, text, "=r,f,f", _I32, [args[1], args[0]])

        return u32(f32, f32), codegen

    return made


pack_bf16, pack_f16 = _packer("bf16"), _packer("f16")
"""Two f32 rounded into one word, the first in its low half."""


def _mma(kind: str) -> Any:
    @intrinsic
    def made(typing_context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            text = (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
            )
            constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
            made = _asm(builder, text, constraints, _FLOATS, args, effects=True)
            parts = [builder.extract_value(made, k) for k in range(4)]
            return context.make_tuple(builder, sig.return_type, parts)

        return types.UniTuple(f32, 4)(u32, u32, u32, u32, u32, u32, f32, f32, f32, f32), codegen

    return made


mma_bf16, mma_f16 = _mma("bf16"), _mma("f16")
"""A warp's product of 16x16 and 16x8, added to 16x8 f32: fragments as PTX lays out mma.m16n8k16."""
