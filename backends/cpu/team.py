"""Runs a kernel in the calling thread or on all of this replica's threads.

Numba shares torch's OpenMP threads where the system has an OpenMP library. Where it has none, Numba's
own queue is left, which ends the process when two threads use it at once: then all teams take turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numba
import torch

_ONE_AT_A_TIME = threading.Lock()
SERIAL_ELEMENTS = 1 << 16
"""Below this many elements waking other threads costs more than it saves."""


class Team:
    """The threads of one replica; each thread that runs steps calls `join` first."""

    def __init__(self, num_threads: int) -> None:
        self.size = max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS))
        self._num_threads = num_threads
        self._thread_id = 0
        self.join()
        is_queue = self.size > 1 and numba.threading_layer() == "workqueue"
        self._turn = _ONE_AT_A_TIME if is_queue else contextlib.nullcontext()

    def join(self) -> None:
        """Set how many threads work for the calling thread; both libraries ask per thread."""
        if self._thread_id != threading.get_ident():
            numba.set_num_threads(
                self.size
            )  # first: starting Numba's threads resets torch's number
            torch.set_num_threads(self._num_threads)
            self._thread_id = threading.get_ident()

    def run(
        self,
        share: Callable[..., Any],
        parallel: Callable[..., Any],
        num_elements: int,
        *arguments: Any,
    ) -> None:
        """Run `share(0, 1, *arguments)`, or where it pays `parallel(size, *arguments)`."""
        if self.size == 1 or num_elements < SERIAL_ELEMENTS:
            share(0, 1, *arguments)
            return
        with self._turn:
            parallel(self.size, *arguments)
