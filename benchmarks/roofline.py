"""What this machine can do at best: bytes read and multiplications per second of some threads together.

python benchmarks/roofline.py [--threads 2]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.fast.intrinsics import (
    FLOATS,
    HAS_BRAIN_DOT,
    INTS,
    INTS8,
    LANES,
    routine,
)
from headrace.backends.cpu.fast.kernels_coding import WIDE_IS_SHORT
from headrace.backends.cpu.fast.kernels_tiles import OUTPUTS_AT_ONCE, RESULTS

READ_BYTES = 256 << 20
"""Per thread: far more than any last-level cache here keeps."""
CACHED_BYTES = 256 << 10
"""Per thread: held by a second-level cache."""
READS = 4
"""Times that all of it is read in a round, so that threads which begin apart are together for most of it."""
ROUNDS = 7
CHAINS, PER_CHAIN = 12 if OUTPUTS_AT_ONCE == LANES else 8, 8
"""Sums that do not wait for each other, and products added to each per round."""


@numba.njit(nogil=True, fastmath=True, boundscheck=False)
def sum_words(words: NDArray[np.int64], rounds: int) -> int:
    """Return the sum of `words`, taken `rounds` times: one read of each byte, next to no arithmetic."""
    total = 0
    for _ in range(rounds):
        for place in range(words.shape[0]):
            total ^= words[place]
    return total


def _chains(e: Any, count: Any, address: Any, kind: Any, multiply: Callable[..., Any]) -> Any:
    """Emit `count` rounds of independent products of registers; store the sums, so that none is left out."""
    first = [e.load(address, kind, 64 * place) for place in range(4)]
    slots = [e.variable(first[place % 4]) for place in range(CHAINS)]
    with e.loop(count):
        totals = [e.get(slot) for slot in slots]
        for turn in range(PER_CHAIN):
            totals = [multiply(total, first[turn % 4], first[-1 - turn % 2]) for total in totals]
        for slot, total in zip(slots, totals, strict=True):
            e.set(slot, total)
    for place, slot in enumerate(slots):
        e.store(e.get(slot), address, 64 * (4 + place))


@routine()
def integer_chains(e: Any, count: Any, address: Any) -> None:
    if not WIDE_IS_SHORT:
        _chains(e, count, address, INTS, lambda total, a, b: e.dot(total, a, b, is_signed=False))
        return
    # a product here does not depend on its sum, so it must not be known to be the same each time
    _chains(e, count, address, INTS8, lambda total, a, b: e.dot_shorts(total, e.opaque(a), b))


@routine()
def attention_chains(e: Any, count: Any, address: Any) -> None:
    def multiply(total: Any, a: Any, b: Any) -> Any:
        if not HAS_BRAIN_DOT:
            return e.fma(a, b, total)
        return e.dot_brain(total, *(e.builder.bitcast(value, INTS) for value in (a, b)))

    _chains(e, count, address, FLOATS if HAS_BRAIN_DOT else RESULTS, multiply)


@routine()
def float_chains(e: Any, count: Any, address: Any) -> None:
    _chains(e, count, address, RESULTS, lambda total, a, b: e.fma(a, b, total))


@numba.njit(nogil=True)
def run_integers(count: int, address: int) -> None:
    integer_chains(count, address)


@numba.njit(nogil=True)
def run_attention(count: int, address: int) -> None:
    attention_chains(count, address)


@numba.njit(nogil=True)
def run_floats(count: int, address: int) -> None:
    float_chains(count, address)


def best_seconds(
    call: Callable[[int], object], threads: int, rounds: int = ROUNDS, *, together: bool = False
) -> float:
    """Return the best time of the slowest of `threads` that run `call(index)`, started together.

    Core time, which leaves out what other processes take of a core; or with `together` from the first start
    to the last end, since two that take turns on a core do not share the memory.
    """
    found = []
    for _ in range(rounds + 1):
        gate = threading.Barrier(threads)
        clock = time.perf_counter if together else time.thread_time
        times = [(0.0, 0.0)] * threads

        def work(
            index: int,
            gate: threading.Barrier = gate,
            times: list[tuple[float, float]] = times,
            clock: Callable[[], float] = clock,
        ) -> None:
            gate.wait()
            start = clock()
            call(index)
            times[index] = start, clock()

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        starts, ends = zip(*times, strict=True)
        if together:
            found.append(max(ends) - min(starts))
        else:
            found.append(max(end - start for start, end in times))
    return min(found[1:])


def read_bandwidth(threads: int, part_bytes: int = READ_BYTES) -> float:
    """Return bytes per second that `threads` read together, `part_bytes` each over and over."""
    repeats = READS * (READ_BYTES // part_bytes)
    parts = [np.ones(part_bytes // 8, np.int64) for _ in range(threads)]
    seconds = best_seconds(lambda index: sum_words(parts[index], repeats), threads, together=True)
    return threads * part_bytes * repeats / seconds


def multiplications(threads: int, kind: str) -> float:
    """Return multiplications per second of registers: "integer", "attention" or "f32" (see RATES)."""
    run, per_product, _ = RATES[kind]
    count = 200_000
    memory = np.zeros((threads, 16 * (4 + CHAINS) + 16), np.int32)
    seconds = best_seconds(lambda index: run(count, memory[index].ctypes.data), threads)
    return threads * count * CHAINS * PER_CHAIN * per_product / seconds


RATES: dict[str, tuple[Callable[[int, int], None], int, str]] = {
    "integer": (run_integers, 16, "int16") if WIDE_IS_SHORT else (run_integers, 4 * LANES, "int8"),
    "attention": (
        (run_attention, 2 * LANES, "bf16")
        if HAS_BRAIN_DOT
        else (run_attention, OUTPUTS_AT_ONCE, "f32")
    ),
    "f32": (run_floats, OUTPUTS_AT_ONCE, "f32"),
}
"""Which code, multiplications in one product, and of what: products of weights are of integers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print(f"{threads} threads together, best of {ROUNDS}")
    for name, size in (("memory", READ_BYTES), ("second-level cache", CACHED_BYTES)):
        print(f"  read from {name}: {read_bandwidth(threads, size) / 1e9:.1f} GB/s")
    for kind, (_, _, numbers) in RATES.items():
        print(
            f"  {kind} multiplications ({numbers}): {multiplications(threads, kind) / 1e9:.0f} G/s"
        )


if __name__ == "__main__":
    main()
