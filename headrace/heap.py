"""What a process that lives long does about memory that it needed once."""

from __future__ import annotations

import ctypes
import gc


def return_free_memory() -> None:
    """Collect garbage, and give the pages that malloc keeps back to the system, where it can (glibc).

    Arrays of ever other sizes leave holes between what lives; without this the heap of a busy day
    stays as large as its fullest moment.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
