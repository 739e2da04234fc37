"""The draw as a C function, compiled once: the thread that computed a step calls it, or Python does."""

from __future__ import annotations

import numpy as np
from numba import carray

from headrace.backends.cpu.fast.compiled import fast_callback
from headrace.backends.cpu.kernels_rows import floats, ints, longs
from headrace.backends.cpu.kernels_sampling import sample_share
from headrace.backends.cpu.kernels_vector import as_pointer

NUM_ARGUMENTS = 26


@fast_callback("void(int64, int64, int64)")
def draw_share(worker, num_workers, arguments_at):  # type: ignore[no-untyped-def]
    """sample_share, its arguments in memory: headrace.backends.cpu.draw.Draw.native has them."""
    a = longs(arguments_at, NUM_ARGUMENTS)
    vocab, rows, history, biases, top = a[2], a[3], a[4], a[5], a[6]
    sample_share(
        worker, num_workers, a[0], a[1], vocab,
        carray(as_pointer(a[10]), (a[9], 2 * vocab), np.float32),
        carray(as_pointer(a[11]), (rows, 6), np.float32),
        carray(as_pointer(a[12]), (rows, 7), np.int32),
        longs(a[13], rows), carray(as_pointer(a[14]), (rows,), np.uint64),
        ints(a[15], history), ints(a[16], history), ints(a[17], biases), floats(a[18], biases),
        ints(a[19], rows), carray(as_pointer(a[20]), (a[7], a[8]), np.int32),
        ints(a[21], rows), carray(as_pointer(a[22]), (rows,), np.bool_), floats(a[23], rows),
        carray(as_pointer(a[24]), (rows, top), np.int32),
        carray(as_pointer(a[25]), (rows, top), np.float32),
    )  # fmt: skip
