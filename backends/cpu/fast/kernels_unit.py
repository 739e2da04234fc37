"""A unit of a product as a C function: the interpreter calls it through its address.

It is called from two places, and is most of the machine code that a step consists of. Linked in, it would be
optimized once more with everything that calls it.
"""

from __future__ import annotations

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_callback
from headrace.backends.cpu.fast.kernels_matmul import NUM_ARGUMENTS, multiply_unit
from headrace.backends.cpu.kernels_rows import longs


@fast_callback("void(int64, int64, int64)")
def run_unit_at(arguments_at, observes, _):  # type: ignore[no-untyped-def]
    """multiply_unit, its arguments in memory: kernels_matmul.run_unit writes them."""
    a = longs(arguments_at, NUM_ARGUMENTS)
    op, places = longs(a[0], at.NUM_FIELDS), (a[5], a[6], a[7], a[8], a[9])
    multiply_unit(op, a[1], a[2], a[3], a[4], places, observes != 0)
