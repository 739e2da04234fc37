"""Runs checks of the CUDA C++ kernels apart from the tests, under a sanitizer or with planted faults.

usage: python sanitized.py "address,undefined"|thread|none JOBS
JOBS is JSON, a list of [DEFINE or "-", [CHECK, ...]]. The caller preloads the sanitizer's library. One process
imports torch under the sanitizer, which takes longer than most jobs, and forks for each job, two at a time:
a job that ends by a sanitizer's report ends alone. Standard output is JSON, a list of [exit status, standard
error]; status 0: every check passed in every order of threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gpu.cases import ATTENTION_CASES, check_attention
from gpu.cuda_builds import MUTANTS, SANITIZED
from gpu.cuda_cpp import cuda_kernels
from gpu.row_cases import DRAW_CASES, ROW_CASES

from headrace.backends.gpu.kernels import Kernels
from headrace.testing.cuda_cpu.launcher import ORDERS

Job = tuple[str, Sequence[str]]
"""What is defined on top ("-": nothing), and the checks to run with it."""
UNPLANTED: Sequence[Job] = [("-", SANITIZED[::2]), ("-", SANITIZED[1::2])]
"""Halves, for two processors."""
AT_ONCE = 2
MODES = ("none", "address,undefined", "thread")
LIBRARIES = {
    "address,undefined": ("libasan.so", "libubsan.so"),
    "thread": ("libtsan.so",),
    "none": (),
}


CHECKS: Mapping[str, Callable[[Kernels], None]] = {
    **ROW_CASES,
    **DRAW_CASES,
    **{case.name: functools.partial(check_attention, case) for case in ATTENTION_CASES},
}


NOTICED = {
    "none": r"AssertionError|KernelError",
    "address,undefined": r"ERROR: AddressSanitizer|runtime error",
    "thread": r"WARNING: ThreadSanitizer: data race",
}
"""What standard error says when a fault was noticed, and not something else went wrong."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one job ended."""

    status: int
    errors: str


def run_apart(mode: str, jobs: Sequence[Job]) -> list[Ended]:
    """Run this file's jobs under the sanitizer, and return how each ended."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(_library(name) for name in LIBRARIES[mode]),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=66:halt_on_error=1:die_after_fork=0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # no thread is there when the process forks
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    # the thread sanitizer wants the address space that randomisation may take
    prefix = ["setarch", "-R"] if mode == "thread" else []
    command = [*prefix, sys.executable, __file__, mode, json.dumps(jobs)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Ended(status, errors) for status, errors in json.loads(done.stdout)]


def jobs_of(mode: str) -> list[Job]:
    """Return the checks that must pass under a sanitizer, then the planted faults that it must notice."""
    planted = [(define, (check,)) for (define, check), how in MUTANTS.items() if how == mode]
    return [*(UNPLANTED if mode != "none" else ()), *planted]


def endings(mode: str) -> list[Ended]:
    """Return how each of `jobs_of(mode)` ended; they run once, whichever thread asks first."""
    with _once:
        return _endings(mode)


_once = threading.Lock()


@functools.cache
def _endings(mode: str) -> list[Ended]:
    return run_apart(mode, jobs_of(mode))


def _library(name: str) -> str:
    done = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    mode, jobs = sys.argv[1], json.loads(sys.argv[2])
    os.nice(10)  # tests beside this come first
    _end_with_parent()
    os.environ.pop("LD_PRELOAD", None)  # compilers that jobs start need no sanitizer
    running: dict[int, int] = {}
    files = [tempfile.TemporaryFile() for _ in jobs]
    ended: list[tuple[int, str]] = [(-1, "")] * len(jobs)
    for number in range(len(jobs) + AT_ONCE):
        if len(running) == AT_ONCE or (number >= len(jobs) and running):
            process, status = os.wait()
            index = running.pop(process)
            files[index].seek(0)
            errors = files[index].read().decode(errors="replace")
            ended[index] = os.waitstatus_to_exitcode(status), errors[-20_000:]
        if number < len(jobs):
            process = os.fork()
            if process == 0:
                _work(mode, jobs[number], files[number].fileno())
            running[process] = number
    json.dump(ended, sys.stdout)


def _end_with_parent() -> None:
    """A test run that is broken off leaves no job behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _work(mode: str, job: Job, errors: int) -> NoReturn:
    _end_with_parent()
    os.dup2(errors, 2)
    status = 1
    try:
        run(mode, *job)
        status = 0
    except BaseException:  # a forked process must not go on as its parent would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(mode: str, define: str, checks: Sequence[str]) -> None:
    """Run checks in this process. AssertionError or KernelError where one fails."""
    defines = {} if define == "-" else {define: 1}
    kernels, launcher = cuda_kernels(defines, "" if mode == "none" else mode)
    orders = ORDERS if mode == "none" else ORDERS[:1]
    # blocks are unordered only where nothing is planted: every fiber of theirs is then kept
    unordered = mode == "thread" and not defines
    for name in checks:
        copies = name not in {**ROW_CASES, **DRAW_CASES}
        landings = (False, True) if copies else (False,)  # at the wait, at once
        for order, early in itertools.product(orders, landings):
            launcher.configure(order, unordered=unordered, early=early)
            CHECKS[name](kernels)


if __name__ == "__main__":
    main()
