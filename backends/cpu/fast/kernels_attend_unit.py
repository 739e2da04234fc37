"""A unit of attention as a C function: the interpreter calls it through its address (see kernels_unit).

So the two are compiled beside each other, and attention is optimized once, not again with the interpreter. Each
form of keys and values has a function of its own, and only the one that a pool needs is compiled.
"""

from __future__ import annotations

import functools

from headrace.backends.cpu.fast.compiled import fast_callback
from headrace.backends.cpu.fast.kernels_attend import attend_unit
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS


def attend_pairs_at(arguments_at, unit, following):  # type: ignore[no-untyped-def]
    attend_unit(arguments_at, unit, following, PAIRS)


def attend_codes_at(arguments_at, unit, following):  # type: ignore[no-untyped-def]
    attend_unit(arguments_at, unit, following, CODES)


_FUNCTIONS = {PAIRS: attend_pairs_at, CODES: attend_codes_at}


@functools.cache
def attention_at(form: int) -> int:
    """Return the address for a form, PAIRS or CODES; compiles where the cache has none."""
    return int(_compiled(form).address)


@functools.cache
def _compiled(form: int):  # type: ignore[no-untyped-def]
    return fast_callback("void(int64, int64, int64)")(_FUNCTIONS[form])
