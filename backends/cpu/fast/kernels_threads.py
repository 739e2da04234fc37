"""How threads come by steps: a caller posts them, workers take them in order, spin, give way and park.

A step is posted as a command: its number, and where it is described. A caller takes part as thread 0, or leaves
the step to the workers, goes on, and sleeps when it wants the result.
"""

from __future__ import annotations

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics_threads import (
    atomic_add,
    atomic_load,
    core_number,
    now_nanoseconds,
    park,
    pause,
    wake_all,
    yield_core,
)
from headrace.backends.cpu.fast.kernels_program import (
    CONTROL_WORD,
    SPINS,
    draw_and_tell,
    run_program,
    wait_for_turn,
)
from headrace.backends.cpu.kernels_rows import longs

YIELD_NANOSECONDS = 2_000_000
"""How long a worker without work gives way before it parks: longer than the host takes between steps."""


@fast_kernel
def wait_for_command(control, seen):  # type: ignore[no-untyped-def]
    """Return once more than `seen` commands were posted: spin, give way, then park."""
    command = control + at.COMMAND * CONTROL_WORD
    parked = control + at.PARKED * CONTROL_WORD
    for _ in range(SPINS):
        if atomic_load(command) > seen:
            return
        pause()
    started = now_nanoseconds()
    while now_nanoseconds() - started < YIELD_NANOSECONDS:
        if atomic_load(command) > seen:
            return
        yield_core()
    while atomic_load(command) <= seen:
        atomic_add(parked, 1)
        park(command, seen)
        atomic_add(parked, -1)


@fast_kernel
def post(control, parameters_at):  # type: ignore[no-untyped-def]
    """Make a described step the next command and wake whoever shall compute it."""
    command = control + at.COMMAND * CONTROL_WORD
    parameters = longs(parameters_at, at.NUM_PARAMETERS)
    counters = longs(parameters[at.COUNTERS], parameters[at.NUM_OPERATIONS] * at.LINE_WORDS)
    counters[:] = 0
    number = atomic_load(command)
    parameters[at.STEP_NUMBER] = number
    longs(control + at.QUEUE * CONTROL_WORD, 2)[number % 2] = parameters_at
    atomic_add(command, 1)
    has_workers = parameters[at.NUM_THREADS] > 1 or parameters[at.FIRST_THREAD] > 0
    if has_workers and atomic_load(control + at.PARKED * CONTROL_WORD) > 0:
        wake_all(command)


@fast_kernel
def takes_part(parameters_at, number, tid):  # type: ignore[no-untyped-def]
    """Whether thread `tid` computes command `number`.

    A command in which it takes part waits for it. Any other may be done by the time that it looks, and a
    later one be described in its place: then the number differs, before or after the rest is read.
    """
    first = atomic_load(parameters_at + at.STEP_NUMBER * 8)
    start = atomic_load(parameters_at + at.FIRST_THREAD * 8)
    count = atomic_load(parameters_at + at.NUM_THREADS * 8)
    again = atomic_load(parameters_at + at.STEP_NUMBER * 8)
    return first == number and again == number and start <= tid < start + count


@fast_kernel
def note_core(control, tid):  # type: ignore[no-untyped-def]
    """Write down where this thread runs."""
    longs(control + (at.CORE + tid * at.LINE_WORDS) * CONTROL_WORD, 1)[0] = core_number() + 1


@fast_kernel
def enter(tid, control, parameters_at, joins):  # type: ignore[no-untyped-def]
    """Thread 0: post a step and take part in it, or with `joins` in what is left of one that a worker computes.
    Others: take the commands in order until told to stop."""
    if tid == 0 and not joins:
        post(control, parameters_at)
    number = 0
    while True:
        if tid != 0:
            wait_for_command(control, number)
            if atomic_load(control + at.STOP * CONTROL_WORD) != 0:
                return
            note_core(control, tid)
            parameters_at = atomic_load(control + (at.QUEUE + number % 2) * CONTROL_WORD)
        if tid == 0 or takes_part(parameters_at, number, tid):
            is_first = wait_for_turn(tid, parameters_at, control)
            target = run_program(tid, parameters_at, control, joins)
            draw_and_tell(tid, is_first, parameters_at, control, target)
        if tid == 0:
            return
        number += 1


@fast_kernel
def wait_until_done(control, parameters_at, spins_before):  # type: ignore[no-untyped-def]
    """Return when a posted step is done: spin, then sleep."""
    number = longs(parameters_at, at.NUM_PARAMETERS)[at.STEP_NUMBER]
    done = control + at.DONE * CONTROL_WORD
    waiting = control + at.WAITING * CONTROL_WORD
    spins = spins_before
    while spins > 0 and atomic_load(done) <= number:
        spins -= 1
        pause()
    while atomic_load(done) <= number:
        seen = atomic_load(done)
        atomic_add(waiting, 1)
        if seen <= number:
            park(done, seen)
        atomic_add(waiting, -1)


@fast_kernel
def stop(control):  # type: ignore[no-untyped-def]
    """Tell every worker to leave."""
    command = control + at.COMMAND * CONTROL_WORD
    atomic_add(control + at.STOP * CONTROL_WORD, 1)
    atomic_add(command, 1)
    if atomic_load(control + at.PARKED * CONTROL_WORD) > 0:
        wake_all(command)
