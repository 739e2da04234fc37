"""Keeps a thread that computes off the cores where its fellows compute.

A thread that another one wakes may be put on the core of who woke it. Two that compute one step there wait for
each other at every barrier until the kernel balances, some milliseconds later.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection


class Seat:
    """Where the calling thread sits."""

    def __init__(self) -> None:
        is_known = sys.platform == "linux" and hasattr(os, "sched_setaffinity")
        self._core = getattr(ctypes.CDLL(None), "sched_getcpu", None) if is_known else None

    def leave(self, taken: Collection[int]) -> bool:
        """Move to another core that this thread may use if it sits on one of these; return whether it did."""
        if self._core is None or self._core() not in taken:
            return False
        try:
            allowed = os.sched_getaffinity(0)
            free = allowed.difference(taken)
            if not free:
                return False
            try:
                os.sched_setaffinity(0, free)  # moves it at once
            finally:
                os.sched_setaffinity(0, allowed)
        except OSError:  # not allowed here: it stays where it is put
            self._core = None
            return False
        return True
