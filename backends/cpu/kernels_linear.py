"""x @ weight.T on plain rows, each output summed in one fixed order: independent of batch and threads.

Serves the vocabulary's matrix always (its rows are also the embedding, and logits stay f32) and every
product under `deterministic`. 16 rows of the weight are expanded to f32 (they stay in the first
cache) and meet all rows of x.

A vocabulary of 49,152 x 576 on Zen 5, one thread, ms at 1 / 4 / 16 / 64 rows: this in bf16 with f32
logits 4.5 / 5.6 / 8.8 / 22; oneDNN packed bf16 with bf16 logits 1.4 / 1.8 / 3.1 / 8.7, but near 16 those
logits are 1/8 apart.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_rows import F32, address_of, floats, load_row, row_size
from headrace.backends.cpu.kernels_vector import LANES, dot16


@kernel()
def product_share(  # type: ignore[no-untyped-def]
    worker, num_workers, x, x_format, x_stride, weight, weight_format, bias, out, out_stride, num_rows, in_size,
    out_size,
):  # fmt: skip
    """out [T, out_size] f32 = x [T, in_size] @ weight [out_size, in_size].T + bias (its address, or 0)."""
    row_bytes = in_size * row_size(weight_format)
    whole = in_size // LANES * LANES
    tile = np.empty(LANES * in_size, np.float32)
    values = np.empty(num_rows * in_size if x_format != F32 else 1, np.float32)
    if x_format != F32:
        for t in range(num_rows):
            target = values[t * in_size : (t + 1) * in_size]
            load_row(x + t * x_stride, x_format, in_size, target)
        x = address_of(values)
        x_stride = in_size * 4
    sums = np.empty(LANES, np.float32)
    num_tiles = (out_size + LANES - 1) // LANES
    first, last = num_tiles * worker // num_workers, num_tiles * (worker + 1) // num_workers
    for index in range(first, last):
        column = index * LANES
        count = min(LANES, out_size - column)
        start = weight + column * row_bytes
        if weight_format != F32 or count < LANES:
            for i in range(LANES):
                target = tile[i * in_size : (i + 1) * in_size]
                if i < count:
                    load_row(start + i * row_bytes, weight_format, in_size, target)
                else:
                    target[:] = np.float32(0.0)
            start = address_of(tile)
        for t in range(num_rows):
            dot16(x + t * x_stride, start, in_size * 4, in_size, address_of(sums))
            target = floats(out + t * out_stride + column * 4, count)
            row = floats(x + t * x_stride, in_size)
            for i in range(count):
                total = sums[i]
                if whole < in_size:
                    rows = floats(start + i * in_size * 4, in_size)
                    for j in range(whole, in_size):
                        total += row[j] * rows[j]
                if bias != 0:
                    total += floats(bias, out_size)[column + i]
                target[i] = total


@kernel(parallel=True)
def product_parallel(  # type: ignore[no-untyped-def]
    num_workers,
    x,
    x_format,
    x_stride,
    weight,
    weight_format,
    bias,
    out,
    out_stride,
    num_rows,
    in_size,
    out_size,
):
    for worker in prange(num_workers):
        product_share(
            np.int64(worker), num_workers, x, x_format, x_stride, weight, weight_format, bias, out, out_stride,
            num_rows, in_size, out_size,
        )  # fmt: skip
