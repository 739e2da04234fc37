"""Norms, gated activations, and rotation with the write of keys and values.

| version | remark | H200 us (batch 64) |
|---|---|---|
| one element per thread and step | rows are short and in L2: these launches are latency, not bandwidth | |
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.formats import ELEMENTS, LOADS, STORES, device
from headrace.backends.cuda_numba.kernels.source import FP8, FULL_WARP, INT8, KernelSource

exp2_fast, reciprocal_fast = primitives.exp2_fast, primitives.reciprocal_fast
round_even, float_to_e4m3 = primitives.round_even, primitives.float_to_e4m3
float_as_word, inverse_root_fast = primitives.float_as_word, primitives.inverse_root_fast
f32, i32, i64, u8, u32 = types.float32, types.int32, types.int64, types.uint8, types.uint32
P = types.CPointer
LOG2_E = 1.4426950408889634
SQRT_2_OVER_PI = 0.7978845608028654
GATE_THREADS, GATE_STEPS = 128, 8
ROPE_WARPS = 4
LARGEST = {FP8: 448.0, INT8: 127.0}


def rms_norm(act: str, out: str, adds: int, warps: int) -> KernelSource:
    """x / rms(x) * weight for runs of `size`, x + residual where it `adds`. Grid: rows, runs of a row."""
    load, store = LOADS[act], STORES[out]
    THREADS = 32 * warps

    def kernel(x, x_stride, residual, residual_stride, weight, result, result_stride, size, eps):  # type: ignore[no-untyped-def]
        thread = cuda.threadIdx.x
        start = i64(cuda.blockIdx.x) * x_stride + i64(cuda.blockIdx.y) * size
        kept = i64(cuda.blockIdx.x) * residual_stride + i64(cuda.blockIdx.y) * size
        target = i64(cuda.blockIdx.x) * result_stride + i64(cuda.blockIdx.y) * size
        partial = cuda.shared.array(warps, f32)
        squares = f32(0.0)
        for i in range(thread, size, THREADS):
            value = load(x, start + i)
            if adds:
                value += residual[kept + i]
                residual[kept + i] = value
            squares += value * value
        for shuffle in range(5):
            squares += cuda.shfl_xor_sync(FULL_WARP, squares, 1 << shuffle)
        if warps > 1:
            if thread % 32 == 0:
                partial[thread // 32] = squares
            cuda.syncthreads()
            squares = f32(0.0)
            for w in range(warps):
                squares += partial[w]
        factor = inverse_root_fast(squares * reciprocal_fast(f32(size)) + eps)
        for i in range(thread, size, THREADS):
            value = residual[kept + i] if adds else load(x, start + i)
            store(result, target + i, value * factor * weight[i])

    signature = types.void(
        P(ELEMENTS[act]), i64, P(f32), i64, P(f32), P(ELEMENTS[out]), i64, i32, f32
    )
    return KernelSource(kernel, signature, THREADS)


def gate(act: str, out: str, activation: int) -> KernelSource:
    """act(x[:, :size]) * x[:, size:]. Grid: rows, runs of 1,024 columns. activation 0: SiLU, 1: GELU (tanh)."""
    load, store = LOADS[act], STORES[out]

    def kernel(x, x_stride, result, result_stride, size):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.y * (GATE_THREADS * GATE_STEPS) + cuda.threadIdx.x
        start = i64(cuda.blockIdx.x) * x_stride
        target = i64(cuda.blockIdx.x) * result_stride
        for step in range(GATE_STEPS):
            i = first + step * GATE_THREADS
            if i < size:
                value = load(x, start + i)
                if activation == 0:
                    inner = value
                else:
                    # 0.5 (1 + tanh(y)) is the logistic function of 2 y
                    cubed = value * value * value
                    inner = f32(2.0 * SQRT_2_OVER_PI) * (value + f32(0.044715) * cubed)
                share = reciprocal_fast(f32(1.0) + exp2_fast(-inner * f32(LOG2_E)))
                store(result, target + i, value * share * load(x, start + size + i))

    signature = types.void(P(ELEMENTS[act]), i64, P(ELEMENTS[out]), i64, i32)
    return KernelSource(kernel, signature, GATE_THREADS)


@device
def _store_e4m3(array, index, value):  # type: ignore[no-untyped-def]
    array[index] = u8(float_to_e4m3(value))


@device
def _store_e4m3_rounded(array, index, value):  # type: ignore[no-untyped-def]
    # where the device has no conversion: round to a multiple of the step at this magnitude
    sign = u32(128) if value < f32(0.0) else u32(0)
    size = min(abs(value), f32(448.0))
    if size != size:
        array[index] = u8(127)
        return
    exponent = max(i32(float_as_word(size) >> u32(23)) - i32(127), i32(-6))
    steps = round_even(size * exp2_fast(f32(3 - exponent)))
    # 8 .. 16 steps are a normal number of this exponent, 16 the next one; below 8 subnormal
    code = (exponent + 7) * 8 + steps - 8 if steps >= 8 else steps
    array[index] = u8(sign | u32(code))


@device
def _store_int8(array, index, value):  # type: ignore[no-untyped-def]
    array[index] = u8(round_even(value) & i32(255))


def rope_write_kv(
    head_dim: int, half: int, q: str, k: str, v: str, out: str, kv: str, native_fp8: int
) -> KernelSource:  # fmt: skip
    """Rotate q to `result` and k to its slot, store v; a warp per row. Grid: tokens, rows over 4.

    Rows of a token: query heads, key heads, value heads. Element i < half pairs with i + half.
    """
    D = head_dim
    STEPS = -(-D // 32)
    load_q, load_k, load_v, store_result = LOADS[q], LOADS[k], LOADS[v], STORES[out]
    scaled = kv in LARGEST
    largest_code = LARGEST.get(kv, 1.0)
    if not scaled:
        store = STORES[kv]
    elif kv == INT8:
        store = _store_int8
    else:
        store = _store_e4m3 if native_fp8 else _store_e4m3_rounded
    pool_type = u8 if scaled else ELEMENTS[kv]

    def kernel(  # type: ignore[no-untyped-def]
        q, q_stride, k, k_stride, v, v_stride, result, result_stride, cosines, sines, positions,
        slots, keys, values, key_scales, value_scales, num_heads, num_kv_heads,
    ):  # fmt: skip
        token = cuda.blockIdx.x
        lane = cuda.threadIdx.x % 32
        row = cuda.blockIdx.y * ROPE_WARPS + cuda.threadIdx.x // 32
        if row >= num_heads + 2 * num_kv_heads:
            return
        turned = cuda.local.array(STEPS, f32)
        position = i64(positions[token]) * half
        is_value = row >= num_heads + num_kv_heads
        is_query = row < num_heads
        largest = f32(0.0)
        for step in range(STEPS):
            i = step * 32 + lane
            value = f32(0.0)
            if i < D:
                if is_value:
                    at = i64(token) * v_stride + (row - num_heads - num_kv_heads) * D
                    value = load_v(v, at + i)
                else:
                    other = i + half if i < half else i - half
                    if i >= 2 * half:
                        other = i
                    if is_query:
                        at = i64(token) * q_stride + row * D
                        value = load_q(q, at + i)
                        partner = load_q(q, at + other)
                    else:
                        at = i64(token) * k_stride + (row - num_heads) * D
                        value = load_k(k, at + i)
                        partner = load_k(k, at + other)
                    if i < half:
                        value = value * cosines[position + i] - partner * sines[position + i]
                    elif i < 2 * half:
                        value = (
                            value * cosines[position + other] + partner * sines[position + other]
                        )
            turned[step] = value
            largest = max(largest, abs(value))
            if value != value:
                largest = value
        if is_query:
            for step in range(STEPS):
                i = step * 32 + lane
                if i < D:
                    store_result(result, i64(token) * result_stride + row * D + i, turned[step])
            return
        slot = slots[token]
        if slot < 0:
            return
        head = row - num_heads - num_kv_heads if is_value else row - num_heads
        line = slot * num_kv_heads + head
        factor = f32(1.0)
        if scaled:
            for shuffle in range(5):
                theirs = cuda.shfl_xor_sync(FULL_WARP, largest, 1 << shuffle)
                # a NaN must win, or its row would be read back as numbers
                if theirs > largest or theirs != theirs:
                    largest = theirs
            scale = largest / f32(largest_code)
            factor = f32(1.0) if scale == f32(0.0) else scale
            if lane == 0:
                if is_value:
                    value_scales[line] = scale
                else:
                    key_scales[line] = scale
        for step in range(STEPS):
            i = step * 32 + lane
            if i < D:
                value = turned[step] / factor if scaled else turned[step]
                if is_value:
                    store(values, line * D + i, value)
                else:
                    store(keys, line * D + i, value)

    pool = P(pool_type)
    signature = types.void(
        P(ELEMENTS[q]), i64, P(ELEMENTS[k]), i64, P(ELEMENTS[v]), i64, P(ELEMENTS[out]), i64,
        P(f32), P(f32), P(i32), P(i64), pool, pool, P(f32), P(f32), i32, i32,
    )  # fmt: skip
    return KernelSource(kernel, signature, 32 * ROPE_WARPS)
