"""Time one step of a model on the CPU backend, no engine around it: decodes at 1, 4, 16, 64 rows and prefill.

python benchmarks/cpu_step.py MODEL [--dtype bfloat16] [--threads 2] [--profile ROWS]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.cpu.backend import CpuBackend
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.models.checkpoint import open_model
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.types import EngineSettings, ForwardBatch

BLOCK_SIZE = 16
CONTEXT = 200


def anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def load(path: Path) -> LoadedModel:
    registries = Registries.from_manager(create_plugin_manager(discover=False))
    names = [name for name in registries.models.names() if name != "scripted"]
    known = {name: registries.models.get(name) for name in names}
    return open_model(path, name=path.name, registry_models=known)


def run(runner: Runner, batches: Sequence[ForwardBatch]) -> None:
    for batch in batches:
        handle = runner.execute(batch)
        handle.sample()
        handle.result()


def timed(call: Callable[[], None], count: int) -> tuple[float, float]:
    """Return the median and the best of `count` calls, in milliseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times), min(times)


def decode(num_rows: int, temperature: float, context: int = CONTEXT) -> ForwardBatch:
    per_sequence = -(-(context + 1) // BLOCK_SIZE)
    sequences = [
        SequenceStep([7], context, range(row * per_sequence, (row + 1) * per_sequence))
        for row in range(num_rows)
    ]
    columns: dict[str, Sequence[float]] = {"temperature": [temperature] * num_rows}
    columns["seeds"] = range(num_rows)
    sampling = sampling_batch(num_rows, columns)
    return forward_batch(sequences, block_size=BLOCK_SIZE, sampling=sampling, num_groups=2)


def prefill(num_tokens: int, done: int) -> ForwardBatch:
    blocks = range(-(-(done + num_tokens) // BLOCK_SIZE))
    return forward_batch(
        [SequenceStep([7] * num_tokens, done, blocks)], block_size=BLOCK_SIZE, num_groups=2
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    arguments = parser.parse_args()
    settings = EngineSettings(
        dtype=arguments.dtype,
        kv_dtype=arguments.dtype,
        num_threads=arguments.threads,
        deterministic=arguments.deterministic,
        max_model_len=2048,
    )
    backend, model = CpuBackend.open(0, None, SystemClock()), load(arguments.model)
    before, start = anonymous_mb(), time.perf_counter()
    runner = backend.create_runner(model, SingleRank(), settings)
    loaded = time.perf_counter() - start
    print(f"load {loaded:.2f} s, anonymous memory +{anonymous_mb() - before:.0f} MB, ", end="")
    print(f"weights {runner.memory().weight_bytes / 2**20:.0f} MB")
    runner.allocate(64 * 14)
    start = time.perf_counter()
    runner.warm_up(lambda fraction: None)
    print(f"warm up {time.perf_counter() - start:.2f} s")
    if arguments.profile:
        profile(runner, decode(arguments.profile, 0.0))
        return
    for temperature in (0.0, 1.0):
        for rows in (1, 4, 16, 64):
            batch = decode(rows, temperature)
            middle, best = timed(partial(run, runner, [batch]), 15)
            print(f"decode {rows:3} rows, T {temperature}: {middle:7.2f} ms (best {best:.2f})")
    for total, chunk in ((120, 120), (1000, 512), (1000, 128)):
        sizes = [(min(chunk, total - at), at) for at in range(0, total, chunk)]
        batches = [prefill(size, at) for size, at in sizes]
        middle, best = timed(partial(run, runner, batches), 5)
        print(f"prefill {total} in chunks of {chunk}: {middle:.1f} ms (best {best:.1f})")


def profile(runner: Runner, batch: ForwardBatch) -> None:
    run(runner, [batch])
    profiler = cProfile.Profile()
    profiler.enable()
    run(runner, [batch] * 20)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
