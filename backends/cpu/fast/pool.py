"""The threads of a step: the caller and its workers, who spin, give way and park when there is nothing to do.

When a core is taken by another process, a step with two threads waits for whoever was descheduled. So the
pool watches how long its threads waited beyond their spin, and does with one thread until that is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.cores import Seat
from headrace.backends.cpu.fast.kernels_program import SPINS
from headrace.backends.cpu.fast.kernels_threads import enter, post, stop, wait_until_done

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.backends.cpu.fast.step_memory import StepMemory

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
    """Computes steps in the order in which they come. Used by one thread at a time; `close` ends the workers.

    `run` takes part in a step. `launch` leaves one to the workers; at most two of those are under way. Who
    waits for one that a single worker computes takes a share of what is left.
    """

    def __init__(self, num_threads: int, steps: Sequence[StepMemory]) -> None:
        """`steps`: all that will ever be given; the first describes a step of no operations as yet."""
        self._control = np.zeros(CONTROL_WORDS, np.int64)
        self._num_threads = num_threads
        self._seat = Seat()
        self._governors = ThreadGovernors(num_threads)
        self.can_join = num_threads == 2
        """A caller can share what is left of a step with a worker that has begun it alone."""
        self._is_steady = False
        """Whether the last step was launched too. Behind another one somebody's first token is on its way: the
        caller's core is left to those who bring it."""
        self._governors_beside = ThreadGovernors(num_threads if self.can_join else num_threads - 1)
        self._num_arrivals = 0
        self._waited = np.zeros(num_threads, np.int64)
        """Nanoseconds each thread had waited in barriers when the last step was done."""
        self._under_way: deque[StepMemory] = deque()
        self._under_way_since = 0
        """When the first of them was launched or, behind another one, that one's end was seen; nanoseconds."""
        self._workers: list[threading.Thread] = []
        self._enter(steps[0], 1)  # compiles, before any worker does
        for index in range(1, num_threads):
            worker = threading.Thread(
                target=_serve, args=(index, self._control, steps), daemon=True,
                name=f"headrace-cpu-{index}",
            )  # fmt: skip
            try:
                worker.start()
            except RuntimeError:  # no more threads: nobody will have this pool to close it
                self.close()
                raise
            self._workers.append(worker)

    def run(self, step: StepMemory) -> int:
        """Compute a described step; return how many threads it had. Waits for those under way first."""
        self.wait_for_all()
        governor = self._governors.of(int(step.parameters[at.NUM_TOKENS]))
        threads = governor.num_threads()
        self._is_steady = False
        if threads > 1:
            self._leave_workers()
        started = time.perf_counter_ns()
        self._enter(step, threads)
        self._observe(governor, time.perf_counter_ns() - started)
        return threads

    def run_alone(self, step: StepMemory) -> None:
        """Compute a described step with the calling thread only. Waits for those under way first."""
        self.wait_for_all()
        self._enter(step, 1)

    def launch(self, step: StepMemory) -> None:
        """Leave a described step to the workers, behind the one that may be under way."""
        assert self._workers, "a thread of its own computes the step"
        assert len(self._under_way) < 2, "whoever described a third one waited for the first"
        governor = self._governors_beside.of(int(step.parameters[at.NUM_TOKENS]))
        self._describe(step, 1, 1 if self.can_join else governor.num_threads())
        if not self._under_way:
            self._under_way_since = time.perf_counter_ns()
        self._under_way.append(step)
        post(address(self._control), address(step.parameters))

    def wait(self, step: StepMemory) -> None:
        """Return when a launched step is done."""
        while step in self._under_way:
            first = self._under_way.popleft()
            governor = self._governors_beside.of(int(first.parameters[at.NUM_TOKENS]))
            places = address(self._control), address(first.parameters)
            joins = self.can_join and self._is_steady and governor.num_threads() > 1
            self._is_steady = True
            if joins:
                self._leave_workers()
                enter(0, *places, True)
            wait_until_done(*places, SPINS if joins else 0)
            started, self._under_way_since = self._under_way_since, time.perf_counter_ns()
            self._observe(governor, self._under_way_since - started)

    def wait_for_all(self) -> None:
        """Return when nothing is under way."""
        if self._under_way:
            self.wait(self._under_way[-1])

    def num_parked(self) -> int:
        """How many workers sleep in the kernel just now."""
        return int(self._control[at.PARKED])

    def close(self) -> None:
        """End the workers and wait for them. A second call does nothing."""
        self.wait_for_all()
        workers, self._workers = self._workers, []
        if workers:
            stop(address(self._control))
        for worker in workers:
            worker.join()

    def _describe(self, step: StepMemory, first_thread: int, num_threads: int) -> None:
        """Say who computes a step. Barriers count arrivals from the beginning on."""
        parameters = step.parameters
        parameters[at.FIRST_THREAD], parameters[at.NUM_THREADS] = first_thread, num_threads
        if not self._under_way:  # else only steps that nobody joins are, whose arrivals are known
            self._num_arrivals = int(self._control[at.ARRIVED])
        parameters[at.BARRIER_BASE] = self._num_arrivals
        if num_threads > 1:
            self._num_arrivals += num_threads * step.num_barriers

    def _enter(self, step: StepMemory, num_threads: int) -> None:
        self._describe(step, 0, num_threads)
        enter(0, address(self._control), address(step.parameters), False)

    def _leave_workers(self) -> None:
        """Have the calling thread compute where no worker does."""
        cores = self._control[at.CORE + at.LINE_WORDS :: at.LINE_WORDS][: self._num_threads - 1]
        self._seat.leave((cores - 1).tolist())

    def _observe(self, governor: ThreadGovernor, nanoseconds: int) -> None:
        lines = self._control[at.LONG_WAITS :: at.LINE_WORDS][: self._num_threads]
        share = int((lines - self._waited).max()) / max(1, nanoseconds)
        self._waited[:] = lines
        governor.observe(share, nanoseconds / 1e9)


def _serve(index: int, control: NDArray[np.int64], steps: Sequence[StepMemory]) -> None:
    """What a worker looks at lives as long as it does, also where nobody closes the pool."""
    enter(index, address(control), 0, False)
    del steps
