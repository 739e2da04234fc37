"""What a process that lives long does about memory that it needed once."""

from __future__ import annotations

import ctypes
import gc

_THRESHOLDS = (10_000, 20, 20)
"""Objects made before the young are looked at, and how many such looks before the older ones are."""


def keep_what_is_loaded() -> None:
    """Collect garbage and let no later collection walk what lives now; look less often from then on.

    A server makes and drops hundreds of small objects per request, nearly all without cycles. Python's own
    thresholds had the collector run every few requests, a twelfth of what they cost.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def return_free_memory() -> None:
    """Collect garbage, and give the pages that malloc keeps back to the system, where it can (glibc).

    Arrays of ever other sizes leave holes between what lives; without this the heap of a busy day
    stays as large as its fullest moment.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
