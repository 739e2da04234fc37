"""Two revisions of the CPU backend in turn, a tenth of a second each: on a machine with moods only that tells.

python benchmarks/duel.py MODEL --other PYTHON [--cases decode-64,decode-1-at-4000,in-caches] [--part attention]
    [--slices 20] [--threads 2]

PYTHON is the interpreter of an environment with the other revision installed (`pip install -e` of another
checkout). Each revision keeps a process of its own, which profiles steps when it is told to. What is printed is
this revision's core time over the other's: the median of all pairs, and their quartiles. `--part all`: of the
whole step. The case `in-caches` is one row at 4,000 tokens whose table names the same 8 blocks over and over.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

SLICE_SECONDS = 0.1
IN_CACHES = "in-caches"


def serve(model_path: Path, threads: int) -> None:
    """Profile steps of the case that each line of the input names, and write the best and all of its parts."""
    from cpu_step import NUM_BLOCKS, load, run
    from kernels import CASES

    from headrace.backends.cpu.backend import CpuBackend
    from headrace.backends.cpu.fast.runner import FastRunner
    from headrace.clock import SystemClock
    from headrace.group import SingleRank
    from headrace.types import EngineSettings

    answers, sys.stdout = sys.stdout, sys.stderr  # what a start has to say is no answer
    CpuBackend.open(0, None, SystemClock())
    settings = EngineSettings(num_threads=threads, max_model_len=8192, may_choose_kv_dtype=True)
    runner = FastRunner(load(model_path), SingleRank(), settings)
    runner.allocate(NUM_BLOCKS)
    batches = {}
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, part = line.split()
        if name not in batches:
            batch = CASES["decode-1-at-4000" if name == IN_CACHES else name]()
            if name == IN_CACHES:
                tables = np.zeros_like(batch.block_tables)
                tables[:] = np.arange(tables.shape[-1]) % 8
                batch = replace(batch, block_tables=tables)
            batches[name] = batch
            for _ in range(4):
                run(runner, [batch])
        best, end = float("inf"), time.perf_counter() + SLICE_SECONDS
        while time.perf_counter() < end or best == float("inf"):
            parts = runner.profile(batches[name])
            best = min(best, sum(parts.values()) if part == "all" else parts[part])
        print(best, file=answers, flush=True)


@contextmanager
def fighter(python: str, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    command = [python, __file__, str(options.model), "--serve", "--threads", str(options.threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{python} did not get ready: see its error above")
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], name: str, part: str) -> float:
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(f"{name} {part}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"no case {name!r}, or no part {part!r} in a step of it")
    return float(answer)


def duel(processes: Sequence[subprocess.Popen[str]], name: str, options: argparse.Namespace) -> str:
    """Return one case's line."""
    ours, theirs = [], []
    for number in range(options.slices + 1):
        order = processes if number % 2 else processes[::-1]
        found = {process.pid: ask(process, name, options.part) for process in order}
        if number:  # the first pair may have been disturbed by a start
            ours.append(found[processes[0].pid])
            theirs.append(found[processes[1].pid])
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return (
        f"{name}, {options.part}: {median(ratios):.3f} ({low:.3f} to {high:.3f}); best "
        f"{min(ours):.3f} and {min(theirs):.3f} core ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--other", help="Python of an environment with the other revision")
    parser.add_argument("--cases", default=f"decode-1,decode-16,decode-64,prefill-120,{IN_CACHES}")
    parser.add_argument("--part", default="all", help="attention, linear 576 x 960, ...; or all")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.threads)
        return
    if not options.other or options.slices < 2:
        parser.error("--other names the other revision's Python, --slices are 2 or more")
    with ExitStack() as stack:
        pythons = (sys.executable, options.other)
        processes = [stack.enter_context(fighter(python, options)) for python in pythons]
        for name in options.cases.split(","):
            print(duel(processes, name, options), flush=True)


if __name__ == "__main__":
    main()
