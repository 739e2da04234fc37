"""What this machine can do at best: bytes read and multiplications per second of some threads.

python benchmarks/roofline.py [--threads 2]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

READ_BYTES = 256 << 20
"""Per thread: far more than any last-level cache here keeps."""
ROUNDS = 7


@numba.njit(nogil=True, fastmath=True, boundscheck=False)
def sum_words(words: NDArray[np.int64]) -> int:
    """Return the sum of `words`: one read of each byte, next to no arithmetic."""
    total = 0
    for place in range(words.shape[0]):
        total += words[place]
    return total


@numba.njit(nogil=True, fastmath=True, boundscheck=False)
def multiply_f32(values: NDArray[np.float32], rounds: int) -> float:
    """Return a number from rounds * len(values) fused multiply-adds on data that stays in L1."""
    sums = np.zeros(values.shape[0], np.float32)
    for step in range(rounds):
        factor = np.float32(step & 3)
        for place in range(values.shape[0]):
            sums[place] += values[place] * factor
    return float(sums.sum())


def best_seconds(call: Callable[[int], object], threads: int, rounds: int = ROUNDS) -> float:
    """Return the best time in which all threads, started together, finish `call(index)`."""
    found = []
    for _ in range(rounds + 1):
        gate = threading.Barrier(threads + 1)

        def work(index: int, gate: threading.Barrier = gate) -> None:
            gate.wait()
            call(index)
            gate.wait()

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        gate.wait()
        start = time.perf_counter()
        gate.wait()
        found.append(time.perf_counter() - start)
        for worker in workers:
            worker.join()
    return min(found[1:])


def read_bandwidth(threads: int) -> float:
    """Return bytes per second that `threads` read together from memory."""
    parts = [np.ones(READ_BYTES // 8, np.int64) for _ in range(threads)]
    return threads * READ_BYTES / best_seconds(lambda index: sum_words(parts[index]), threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print(f"read bandwidth, {threads} threads: {read_bandwidth(threads) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
