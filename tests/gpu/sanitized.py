"""Runs checks of the CUDA C++ kernels in a process of its own, under a sanitizer or with a planted fault.

usage: python sanitized.py "address,undefined"|thread|none DEFINE|- CHECK...
The caller preloads the sanitizer's library. Exit status 0: every check passed in every order of threads.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu.cases import ATTENTION_CASES, check_attention
from gpu.cuda_cpp import cuda_kernels
from gpu.row_cases import DRAW_CASES, ROW_CASES

from headrace.backends.gpu.kernels import Kernels
from headrace.testing.cuda_cpu.launcher import ORDERS

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


def run_apart(mode: str, define: str, checks: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run this file under the sanitizer, and return how it ended."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(_library(name) for name in LIBRARIES[mode]),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=66:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    # the thread sanitizer wants the address space that randomisation may take
    prefix = ["setarch", "-R"] if mode == "thread" else []
    command = [*prefix, sys.executable, __file__, mode, define, *checks]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def _library(name: str) -> str:
    done = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    mode, define, *names = sys.argv[1:]
    defines = {} if define == "-" else {define: 1}
    kernels, launcher = cuda_kernels(defines, "" if mode == "none" else mode)
    orders = ORDERS if mode == "none" else ORDERS[:1]
    # blocks are unordered only where nothing is planted: every fiber of theirs is then kept
    unordered = mode == "thread" and not defines
    for name in names:
        copies = name not in {**ROW_CASES, **DRAW_CASES}
        landings = (False, True) if copies else (False,)  # at the wait, at once
        for order, early in itertools.product(orders, landings):
            launcher.configure(order, unordered=unordered, early=early)
            CHECKS[name](kernels)


if __name__ == "__main__":
    main()
