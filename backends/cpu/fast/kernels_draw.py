"""The draw of a step by the thread that computed it, so that the next step need not wait for the host."""

from __future__ import annotations

import numpy as np
from numba import carray

from headrace.backends.cpu.fast.compiled import fast_callback
from headrace.backends.cpu.kernels_rows import floats, ints, longs
from headrace.backends.cpu.kernels_sampling import sample_share
from headrace.backends.cpu.kernels_vector import as_pointer

NUM_ARGUMENTS = 23


@fast_callback("void(int64)")
def draw_all(arguments_at):  # type: ignore[no-untyped-def]
    """sample_share for every row, none of them masked; Draw.native has the arguments."""
    a = longs(arguments_at, NUM_ARGUMENTS)
    vocab, rows, history, biases, top = a[2], a[3], a[4], a[5], a[6]
    sample_share(
        0, 1, a[0], a[1], vocab,
        carray(as_pointer(a[7]), (1, 2 * vocab), np.float32),
        carray(as_pointer(a[8]), (rows, 6), np.float32),
        carray(as_pointer(a[9]), (rows, 7), np.int32),
        longs(a[10], rows), carray(as_pointer(a[11]), (rows,), np.uint64),
        ints(a[12], history), ints(a[13], history), ints(a[14], biases), floats(a[15], biases),
        ints(a[16], rows), carray(as_pointer(a[17]), (1, 1), np.int32),
        ints(a[18], rows), carray(as_pointer(a[19]), (rows,), np.bool_), floats(a[20], rows),
        carray(as_pointer(a[21]), (rows, top), np.int32),
        carray(as_pointer(a[22]), (rows, top), np.float32),
    )  # fmt: skip
