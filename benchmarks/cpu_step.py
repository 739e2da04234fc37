"""Time one step of a model on the CPU backend, no engine around it: decodes at 1, 4, 16, 64 rows and prefill.

python benchmarks/cpu_step.py MODEL [--path both] [--busy 1] [--threads 2] [--profile ROWS]
python benchmarks/cpu_step.py MODEL --path fast --contexts 100 4000 [--kv-dtype int8]

Both paths are timed in turn, case by case, so that what else the machine does touches them alike.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from roofline import read_bandwidth

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.cpu.backend import CpuBackend
from headrace.backends.cpu.fast.coding_plan import SHARES
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.models.checkpoint import open_model
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.types import EngineSettings, ForwardBatch

BLOCK_SIZE = 16
NUM_BLOCKS = 64 * 14 + 1
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
    call()
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


def make_runner(path: str, model: LoadedModel, settings: EngineSettings) -> Runner:
    """Return a warm runner of one path, and say what it took."""
    before, start = anonymous_mb(), time.perf_counter()
    if path == "fast":
        from headrace.backends.cpu.fast.runner import FastRunner

        runner: Runner = FastRunner(model, SingleRank(), settings)
    else:
        from headrace.backends.cpu.ops import CpuOps
        from headrace.backends.runner import OpsRunner

        runner = OpsRunner(CpuOps(settings), model, SingleRank(), settings, schemes=CpuOps.schemes)
    loaded = time.perf_counter() - start
    grown, held = anonymous_mb() - before, runner.memory().weight_bytes / 2**20
    runner.allocate(NUM_BLOCKS)
    start = time.perf_counter()
    runner.warm_up(lambda fraction: None)
    warm = time.perf_counter() - start
    print(
        f"{path}: load {loaded:.2f} s, anonymous memory +{grown:.0f} MB, weights {held:.0f} MB, "
        f"warm up {warm:.2f} s"
    )
    fill(runner)
    return runner


def fill(runner: Runner) -> None:
    """Write every block: pages of a pool that were never written all read one page of zeros."""
    size = min(512, NUM_BLOCKS * BLOCK_SIZE)
    run(runner, [prefill(size, 0)])
    written = size // BLOCK_SIZE
    runner.copy_blocks([(block % written, block) for block in range(written, NUM_BLOCKS)])


def cases() -> Iterator[tuple[str, list[ForwardBatch], int]]:
    """Yield what to time: its name, its steps and how often."""
    for temperature in (0.0, 1.0):
        for rows in (1, 4, 16, 64):
            yield f"decode {rows:3} rows, T {temperature}", [decode(rows, temperature)], 15
    yield "decode   1 row, context 1,800", [decode(1, 0.0, 1800)], 15
    for total, chunk in ((120, 120), (1000, 512), (1000, 128)):
        sizes = [(min(chunk, total - at), at) for at in range(0, total, chunk)]
        yield f"prefill {total} in chunks of {chunk}", [prefill(*size) for size in sizes], 5


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Other processes that each keep one core busy meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--path", choices=("fast", "reference", "both"), default="both")
    parser.add_argument("--busy", type=int, default=0, help="neighbours that keep a core busy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="", help="as served unless given")
    parser.add_argument("--contexts", type=int, nargs=2, help="compare a decode at two contexts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--activations", choices=tuple(SHARES), default="mixed")
    parser.add_argument("--profile", type=int, default=0, help="rows of the step to look into")
    arguments = parser.parse_args()
    settings = EngineSettings(
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype or arguments.dtype,
        may_choose_kv_dtype=not arguments.kv_dtype,
        num_threads=arguments.threads,
        deterministic=arguments.deterministic,
        activations=arguments.activations,
        max_model_len=8192,
    )
    CpuBackend.open(0, None, SystemClock())  # sets how long torch's threads spin
    model = load(arguments.model)
    paths = ("reference", "fast") if arguments.path == "both" else (arguments.path,)
    runners = {path: make_runner(path, model, settings) for path in paths}
    for runner in runners.values():
        if arguments.contexts:
            growth(runner, arguments.contexts, arguments.threads)
        elif arguments.profile:
            profile(runner, decode(arguments.profile, 0.0))
    if arguments.contexts or arguments.profile:
        return
    with neighbours(arguments.busy):
        for name, batches, count in cases():
            found = {path: timed(partial(run, r, batches), count) for path, r in runners.items()}
            parts = [
                f"{path} {mid:8.2f} ms (best {best:.2f})" for path, (mid, best) in found.items()
            ]
            if len(found) == 2:
                parts.append(f"ratio {found['fast'][0] / found['reference'][0]:.2f}")
            print(f"{name}: {', '.join(parts)}", flush=True)
    for runner in runners.values():
        runner.close()


def growth(runner: Runner, contexts: Sequence[int], threads: int) -> None:
    """Print what a longer context adds to a decode of one row, beside reading its keys and values once.

    The two are timed in turn. Core time (all threads' together, over their number) leaves out what other
    processes take of the cores; the bandwidth is measured between rounds, as they leave it.
    """
    batches = [decode(1, 0.0, context) for context in contexts]
    walls: list[list[float]] = [[], []]
    cores: list[list[float]] = [[], []]
    rates = []
    by_operation = getattr(runner, "profile", None)
    for _ in range(5):
        for _ in range(10):
            for index, batch in enumerate(batches):
                walls[index].append(timed(partial(run, runner, [batch]), 1)[1])
                if by_operation is not None:
                    cores[index].append(sum(by_operation(batch).values()) / threads)
        rates.append(read_bandwidth(threads, 64 << 20))
    rows = contexts[1] - contexts[0]
    num_bytes = rows * runner.memory().kv_bytes_per_block / BLOCK_SIZE
    reading = num_bytes / max(rates) * 1e3
    print(f"{num_bytes / 1e6:.1f} MB more, {max(rates) / 1e9:.1f} GB/s: {reading:.2f} ms")
    for name, times in (("wall", walls), ("core / threads", cores)):
        if times[0]:
            short, long = (min(values) for values in times)
            print(
                f"{name}: {short:.2f} ms at {contexts[0]}, {long:.2f} ms at {contexts[1]}: "
                f"{long - short:.2f} ms more, {(long - short) / reading:.2f} times reading"
            )


def profile(runner: Runner, batch: ForwardBatch) -> None:
    """Print where a step's time goes: by operation on the fast path, by function on the other."""
    run(runner, [batch] * 3)
    by_operation = getattr(runner, "profile", None)
    if by_operation is not None:
        spent = min((by_operation(batch) for _ in range(20)), key=lambda parts: sum(parts.values()))
        for name, milliseconds in sorted(spent.items(), key=lambda item: -item[1]):
            print(f"{milliseconds:8.3f} ms  {name}")
        return
    profiler = cProfile.Profile()
    profiler.enable()
    run(runner, [batch] * 20)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
