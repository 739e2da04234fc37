"""What is done to each row alone: norms, gated activations, rotation with the KV write.

Rows are f32, bf16 or f16 at any stride (see kernels_rows); everything is computed in f32. One function
per operation computes a worker's share of the rows; a row's result depends on that row alone.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_rows import (
    exp32,
    floats,
    ints,
    load_row,
    longs,
    row_size,
    store_row,
    tanh32,
)

SILU = 0
GELU_TANH = 1

_SQRT_2_OVER_PI = np.float32(0.7978845608028654)
_CUBIC = np.float32(0.044715)


@kernel(fastmath={"reassoc", "contract"})
def _mean_square(values, count):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(count):
        total += values[i] * values[i]
    return total / np.float32(count)


@kernel()
def norm_share(  # type: ignore[no-untyped-def]
    worker, num_workers, x, x_format, x_stride, residual, residual_stride, out, out_format, out_stride,
    weight_at, eps, num_rows, num_groups, size,
):  # fmt: skip
    """out = x / rms(x) * weight per run of `size`; with a residual (f32, address not 0) x + residual
    is normalized and kept in it."""
    weight = floats(weight_at, size)
    row = np.empty(size, np.float32)
    x_bytes, out_bytes = row_size(x_format), row_size(out_format)
    first, last = num_rows * worker // num_workers, num_rows * (worker + 1) // num_workers
    for t in range(first, last):
        for group in range(num_groups):
            load_row(x + t * x_stride + group * size * x_bytes, x_format, size, row)
            if residual != 0:
                kept = floats(residual + t * residual_stride, size)
                for i in range(size):
                    row[i] += kept[i]
                    kept[i] = row[i]
            scale = np.float32(1.0) / np.sqrt(_mean_square(row, size) + np.float32(eps))
            for i in range(size):
                row[i] = row[i] * scale * weight[i]
            target = out + t * out_stride + group * size * out_bytes
            store_row(row, target, out_format, size)


@kernel(parallel=True)
def norm_parallel(  # type: ignore[no-untyped-def]
    num_workers, x, x_format, x_stride, residual, residual_stride, out, out_format, out_stride,
    weight_at, eps, num_rows, num_groups, size,
):  # fmt: skip
    for worker in prange(num_workers):
        norm_share(
            np.int64(worker), num_workers, x, x_format, x_stride, residual, residual_stride,
            out, out_format, out_stride, weight_at, eps, num_rows, num_groups, size,
        )  # fmt: skip


@kernel()
def gate_share(  # type: ignore[no-untyped-def]
    worker,
    num_workers,
    x,
    x_format,
    x_stride,
    out,
    out_format,
    out_stride,
    activation,
    num_rows,
    size,
):
    """out [T, n] = activation(x[:, :n]) * x[:, n:]."""
    row = np.empty(2 * size, np.float32)
    gate, up = row[:size], row[size:]
    first, last = num_rows * worker // num_workers, num_rows * (worker + 1) // num_workers
    for t in range(first, last):
        load_row(x + t * x_stride, x_format, 2 * size, row)
        if activation == SILU:
            for i in range(size):
                gate[i] = gate[i] / (np.float32(1.0) + exp32(-gate[i])) * up[i]
        else:
            for i in range(size):
                g = gate[i]
                inner = _SQRT_2_OVER_PI * (g + _CUBIC * g * g * g)
                gate[i] = np.float32(0.5) * g * (np.float32(1.0) + tanh32(inner)) * up[i]
        store_row(gate, out + t * out_stride, out_format, size)


@kernel(parallel=True)
def gate_parallel(  # type: ignore[no-untyped-def]
    num_workers, x, x_format, x_stride, out, out_format, out_stride, activation, num_rows, size
):
    for worker in prange(num_workers):
        gate_share(
            np.int64(worker), num_workers, x, x_format, x_stride, out, out_format, out_stride,
            activation, num_rows, size,
        )  # fmt: skip


@kernel()
def _rotate(row, cosines, sines, half):  # type: ignore[no-untyped-def]
    """Rotate one head in place: element i pairs with i + half; the rest stays."""
    for i in range(half):
        first, second = row[i], row[i + half]
        row[i] = first * cosines[i] - second * sines[i]
        row[i + half] = second * cosines[i] + first * sines[i]


@kernel()
def rope_share(  # type: ignore[no-untyped-def]
    worker, num_workers, q, q_format, q_stride, k, k_format, k_stride, v, v_format, v_stride, out,
    out_stride, key_plane, value_plane, kv_format, positions_at, slots_at, cosines_at, sines_at,
    num_rows, num_heads, num_kv_heads, head_dim, half,
):  # fmt: skip
    """Rotated q into out (f32), rotated k and v into their slots."""
    positions, slots = ints(positions_at, num_rows), longs(slots_at, num_rows)
    row = np.empty(head_dim, np.float32)
    q_bytes, k_bytes, v_bytes = row_size(q_format), row_size(k_format), row_size(v_format)
    kv_bytes = row_size(kv_format) * head_dim
    first, last = num_rows * worker // num_workers, num_rows * (worker + 1) // num_workers
    for t in range(first, last):
        cosines = floats(cosines_at + np.int64(positions[t]) * half * 4, half)
        sines = floats(sines_at + np.int64(positions[t]) * half * 4, half)
        for head in range(num_heads):
            load_row(q + t * q_stride + head * head_dim * q_bytes, q_format, head_dim, row)
            _rotate(row, cosines, sines, half)
            target = floats(out + t * out_stride + head * head_dim * 4, head_dim)
            for i in range(head_dim):
                target[i] = row[i]
        for head in range(num_kv_heads):
            at = (slots[t] * num_kv_heads + head) * kv_bytes
            load_row(k + t * k_stride + head * head_dim * k_bytes, k_format, head_dim, row)
            _rotate(row, cosines, sines, half)
            store_row(row, key_plane + at, kv_format, head_dim)
            load_row(v + t * v_stride + head * head_dim * v_bytes, v_format, head_dim, row)
            store_row(row, value_plane + at, kv_format, head_dim)


@kernel(parallel=True)
def rope_parallel(  # type: ignore[no-untyped-def]
    num_workers, q, q_format, q_stride, k, k_format, k_stride, v, v_format, v_stride, out,
    out_stride, key_plane, value_plane, kv_format, positions_at, slots_at, cosines_at, sines_at,
    num_rows, num_heads, num_kv_heads, head_dim, half,
):  # fmt: skip
    for worker in prange(num_workers):
        rope_share(
            np.int64(worker), num_workers, q, q_format, q_stride, k, k_format, k_stride, v, v_format, v_stride,
            out, out_stride, key_plane, value_plane, kv_format, positions_at, slots_at, cosines_at,
            sines_at, num_rows, num_heads, num_kv_heads, head_dim, half,
        )  # fmt: skip
