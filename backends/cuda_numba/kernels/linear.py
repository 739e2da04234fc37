"""Products of a few rows with a weight in groups of 32 inputs, 8 or 4 bits: a warp per output.

A lane takes 16 bytes of codes a step: 16 inputs of 8 bits, or one group of 4 bits. The weight is read
once whatever the number of rows; the rows come out of L1.

| version | loads in flight | H200 TB/s |
|---|---|---|
| one 16-byte load per lane and step, 4 warps a block | 1 | |
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.formats import (
    ELEMENTS,
    STORES,
    UNPACKS,
    dot,
    unpack_int8,
    unpack_nibbles,
)
from headrace.backends.cuda_numba.kernels.source import FULL_WARP, VECTOR, KernelSource

load_words_once, load_words = primitives.load_words_once, primitives.load_words
f16_low = primitives.f16_low
f32, i32, i64, u16, u32 = types.float32, types.int32, types.int64, types.uint16, types.uint32
P = types.CPointer
WARPS = 4
GROUP = 32


def quantized_linear(rows: int, act: str, out: str, four_bits: int, biased: int) -> KernelSource:
    """x [rows, in_size] @ weight.T (+ bias). Grid: outputs over 4. `four_bits`: groups have minima."""
    CHUNK = 32 if four_bits else 16
    VEC = VECTOR[act]
    VECTORS = CHUNK // VEC
    ELEMENT_WORDS = VEC // 4
    unpack, store = UNPACKS[act], STORES[out]

    def kernel(  # type: ignore[no-untyped-def]
        x, x_stride, codes, scales, minima, bias, result, result_stride, in_size, num_outputs,
    ):  # fmt: skip
        lane = cuda.threadIdx.x % 32
        output = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        if output >= num_outputs:
            return
        sums = cuda.local.array(rows, f32)
        code = cuda.local.array(CHUNK, f32)
        part = cuda.local.array(VEC, f32)
        for r in range(rows):
            sums[r] = f32(0.0)
        groups = in_size // GROUP
        for chunk in range(lane, in_size // CHUNK, 32):
            words = load_words_once(codes, i64(output) * (in_size // CHUNK) * 4 + chunk * 4)
            first = chunk * CHUNK
            group = i64(output) * groups + first // GROUP
            scale = f16_low(u32(scales[group]))
            minimum = f32(0.0)
            if four_bits:
                minimum = f16_low(u32(minima[group]))
                unpack_nibbles(words, code)
            else:
                unpack_int8(words, code)
            for c in range(CHUNK):
                code[c] = scale * code[c] + minimum
            for r in range(rows):
                for v in range(VECTORS):
                    at = (i64(r) * x_stride + first + v * VEC) // ELEMENT_WORDS
                    unpack(load_words(x, at), part)
                    sums[r] += dot(code, v * VEC, part, VEC)
        for r in range(rows):
            for shuffle in range(5):
                sums[r] += cuda.shfl_xor_sync(FULL_WARP, sums[r], 1 << shuffle)
        if lane == 0:
            for r in range(rows):
                offset = bias[output] if biased else f32(0.0)
                store(result, i64(r) * result_stride + output, sums[r] + offset)

    signature = types.void(
        P(u32), i64, P(u32), P(u16), P(u16), P(f32), P(ELEMENTS[out]), i64, i32, i32
    )
    return KernelSource(kernel, signature, 32 * WARPS)
