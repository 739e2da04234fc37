"""A unit of attention as a C function: the interpreter calls it through its address (see kernels_unit).

So the two are compiled beside each other, and attention is optimized once, not again with the interpreter. Each
form of keys and values has a function of its own, and only the one that a pool needs is compiled.
"""

from __future__ import annotations

import functools

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_callback
from headrace.backends.cpu.fast.kernels_attend import NUM_ARGUMENTS, attend_unit, fetch_unit
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS
from headrace.backends.cpu.kernels_rows import longs


def attend_pairs_at(arguments_at, unit, following):  # type: ignore[no-untyped-def]
    """attend_unit, most of its arguments in memory: kernels_program.run_attention writes them.

    Unit -1: only ask for what the following one reads first.
    """
    a = longs(arguments_at, NUM_ARGUMENTS)
    op, parameters = longs(a[0], at.NUM_FIELDS), longs(a[1], at.NUM_PARAMETERS)
    if unit < 0:
        fetch_unit(op, parameters, a[2], following, a[5])
        return
    attend_unit(op, parameters, a[2], unit, following, (a[3], a[4], a[5]), PAIRS)


def attend_codes_at(arguments_at, unit, following):  # type: ignore[no-untyped-def]
    """The same for the other form."""
    a = longs(arguments_at, NUM_ARGUMENTS)
    op, parameters = longs(a[0], at.NUM_FIELDS), longs(a[1], at.NUM_PARAMETERS)
    if unit < 0:
        fetch_unit(op, parameters, a[2], following, a[5])
        return
    attend_unit(op, parameters, a[2], unit, following, (a[3], a[4], a[5]), CODES)


FUNCTIONS = {PAIRS: attend_pairs_at, CODES: attend_codes_at}


@functools.cache
def attention_at(form: int) -> int:
    """Return the address for a form, PAIRS or CODES; compiles where the cache has none."""
    return int(_compiled(form).address)


@functools.cache
def _compiled(form: int):  # type: ignore[no-untyped-def]
    return fast_callback("void(int64, int64, int64)")(FUNCTIONS[form])
