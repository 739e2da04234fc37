"""The threads of a step: the caller and its workers, who spin, give way and park when there is nothing to do.

When a core is taken by another process, a step with two threads waits for whoever was descheduled. So the
pool watches how long its threads waited beyond their spin, and does with one thread until that is over.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.kernels_program import enter, stop

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONG_WAIT_SHARE = 0.15
"""Of a step's time: above it, the step was disturbed."""
DISTURBED_STEPS = 2
"""Disturbed steps in a row (a calm one takes one back) before the pool does with one thread."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0625, 2.0
"""Time in steps with one thread before all are tried again; doubles while the trial is disturbed."""
CONTROL_WORDS = 4096


class ThreadGovernor:
    """Decides how many threads the next step has. Mutable; knows nothing of threads.

    After disturbed steps it tries one thread, and stays with it for a pause only where that is no slower: a
    neighbour that takes a core for a moment costs two threads less than half of their work.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._disturbed: list[float] = []
        """Seconds of the disturbed steps in a row, the last DISTURBED_STEPS of them."""
        self._together = 0.0
        """What they took when the pause began."""
        self._alone: list[float] = []
        """Seconds of the first steps of a pause."""
        self._pause = FIRST_PAUSE_SECONDS
        self._left = 0.0
        """Of the pause with one thread."""
        self._patience = FIRST_PAUSE_SECONDS
        self._borne = 0.0
        """Time left in which disturbances are borne, because one thread was slower still."""

    def num_threads(self) -> int:
        return 1 if self._left > 0 else self._num_threads

    def observe(self, long_wait_share: float, seconds: float) -> None:
        """Say how long the last step took, and how much of that was waits beyond the spin."""
        if self._left > 0:
            self._left -= seconds
            self._judge(seconds)
        elif self._borne > 0:
            self._borne -= seconds
        elif long_wait_share <= LONG_WAIT_SHARE:
            del self._disturbed[:1]
            if not self._disturbed:
                self._pause = self._patience = FIRST_PAUSE_SECONDS
        else:
            self._disturbed = [*self._disturbed, seconds][-DISTURBED_STEPS:]
            if len(self._disturbed) == DISTURBED_STEPS:
                self._together, self._alone = sum(self._disturbed), []
                del self._disturbed[:1]  # one more is enough for the next pause
                self._left = self._pause
                self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _judge(self, seconds: float) -> None:
        """End the pause where one thread turns out slower than several disturbed ones."""
        if len(self._alone) == DISTURBED_STEPS:
            return
        self._alone.append(seconds)
        if len(self._alone) == DISTURBED_STEPS and sum(self._alone) > self._together:
            self._left = 0.0
            self._borne = self._patience
            self._patience = min(2 * self._patience, MAX_PAUSE_SECONDS)


class ThreadGovernors:
    """A governor for each size of step, since what disturbs a short one is nothing to a long one.

    Behind each token of a single stream the gateway takes a core for a moment: long beside a decode, which
    one thread computes as well, and short beside a prompt, which needs them all.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._by_size: dict[int, ThreadGovernor] = {}

    def of(self, num_tokens: int) -> ThreadGovernor:
        """Return the governor of steps of so many tokens: those of one power of two share one."""
        size = num_tokens.bit_length()
        if size not in self._by_size:
            self._by_size[size] = ThreadGovernor(self._num_threads)
        return self._by_size[size]


class ThreadPool:
    """Runs steps. Used by one thread at a time; `close` ends the workers."""

    def __init__(self, num_threads: int, parameters: NDArray[np.int64]) -> None:
        """`parameters` is the array that every step is described in (see layout)."""
        self._parameters = parameters
        self._control = np.zeros(CONTROL_WORDS, np.int64)
        self._num_threads = num_threads
        self._governors = ThreadGovernors(num_threads)
        self._workers: list[threading.Thread] = []
        enter(0, address(parameters), address(self._control))  # compiles, before any worker does
        for index in range(1, num_threads):
            worker = threading.Thread(
                target=_serve, args=(index, parameters, self._control), daemon=True,
                name=f"headrace-cpu-{index}",
            )  # fmt: skip
            worker.start()
            self._workers.append(worker)

    def run(self) -> int:
        """Run the step that the parameters describe; return how many threads it had."""
        waits = self._control[at.LONG_WAITS : at.LONG_WAITS + self._num_threads * at.LINE_WORDS]
        waits[:] = 0
        governor = self._governors.of(int(self._parameters[at.NUM_TOKENS]))
        threads = governor.num_threads()
        self._parameters[at.NUM_THREADS] = threads
        started = time.perf_counter_ns()
        enter(0, address(self._parameters), address(self._control))
        elapsed = max(1, time.perf_counter_ns() - started)
        governor.observe(int(waits.max()) / elapsed, elapsed / 1e9)
        return threads

    def num_parked(self) -> int:
        """How many workers sleep in the kernel just now."""
        return int(self._control[at.PARKED])

    def close(self) -> None:
        """End the workers and wait for them. A second call does nothing."""
        workers, self._workers = self._workers, []
        if workers:
            stop(address(self._control))
        for worker in workers:
            worker.join()


def _serve(index: int, parameters: NDArray[np.int64], control: NDArray[np.int64]) -> None:
    enter(index, address(parameters), address(control))
