"""Each operation of the CPU backend against its roofline: what it takes and what the machine could at best.

python benchmarks/kernels.py MODEL [--path fast|reference|both] [--cases decode-1,prefill-120]
    [--activations mixed|precise|int8]

An operation cannot be faster than its bytes at the measured read bandwidth, nor than its multiplications at
the measured rate; the share is the larger of the two over the time it took. Weights and the KV pool are read
from memory, activations from the second-level cache. A multiplication of the fast path costs as many integer
products as its activations have parts: of bytes one, or two where they are wide. Times are of both threads
together (core time), best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpu_step import CONTEXT, decode, load, prefill, run
from roofline import CACHED_BYTES, RATES, multiplications, read_bandwidth

from headrace.backends.cpu.backend import CpuBackend
from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.coding_plan import SHARES, CodingPlan
from headrace.backends.cpu.fast.kernels_coding import CODES, WIDE_IS_SHORT
from headrace.backends.cpu.fast.kernels_tiles import PLAIN
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.runner import OpsRunner
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.types import EngineSettings, ForwardBatch, MemoryReport

CASES: Mapping[str, Callable[[], ForwardBatch]] = {
    "decode-1": lambda: decode(1, 0.0),
    "decode-16": lambda: decode(16, 0.0),
    "decode-64": lambda: decode(64, 0.0),
    "decode-1-at-4000": lambda: decode(1, 0.0, 4000),
    "prefill-120": lambda: prefill(120, 0),
    "prefill-512": lambda: prefill(512, 0),
}
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """What all threads reach together."""

    memory: float
    cache: float
    integer: float
    attention: float


@dataclass(slots=True)
class Work:
    """What one kind of operation does in a step, all layers together."""

    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    multiplications: float = 0.0
    """In units of what `rate` counts."""
    rate: str = "integer"

    def seconds(self, machine: Machine) -> tuple[float, str]:
        """Return the least wall time it can take, and what bounds it."""
        times = {
            "memory": self.memory_bytes / machine.memory,
            "cache": self.cache_bytes / machine.cache,
            "arithmetic": self.multiplications
            / (machine.integer if self.rate == "integer" else machine.attention),
        }
        name = max(times, key=lambda key: times[key])
        return times[name], name


@dataclass(frozen=True, slots=True)
class Product:
    """A weight that the forward multiplies by."""

    weight: Any
    is_sampled: bool
    """Its rows are samples, not tokens."""
    plan: CodingPlan | None
    """Of what it is multiplied with, where that is coded in whole numbers."""

    @property
    def cost(self) -> float:
        """Integer products per multiplication."""
        wide = self.plan.num_wide / len(self.plan.groups) if self.plan else 0.0
        narrow_cost, wide_cost = (0.5, 1) if WIDE_IS_SHORT else (1, 2)
        return wide * wide_cost + (1 - wide) * narrow_cost


@contextmanager
def noted_products(held: list[Product], activations: str) -> Iterator[None]:
    """Collect what the fast path multiplies by, in the order of the forward."""
    from headrace.backends.cpu.fast.recorder import Recorder

    linear = Recorder.linear

    def noted(self: Any, x: Any, weight: Any) -> Any:
        domain = self._values[x.value].domain
        out = linear(self, x, weight)
        plan = self._plans.get(self._quantized.get((x, CODES)))
        held.append(Product(weight, domain == at.SAMPLES, plan))
        return out

    Recorder.linear = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recorder.linear = linear  # type: ignore[method-assign]


def work_of(
    model: LoadedModel, products: Sequence[Product], batch: ForwardBatch, memory: MemoryReport
) -> dict[str, Work]:
    """Return the work of each kind of operation, by the fast path's names; memory: of the runner.

    Keys and values of bytes meet queries and weights of two bytes each.
    """
    rows, samples = len(batch.token_ids), len(batch.sample_rows)
    found: dict[str, Work] = defaultdict(Work)
    hidden, head = products[0].weight.in_size, products[-1].weight
    for product in products:
        weight, used = product.weight, samples if product.is_sampled else rows
        columns = sum(run.num_columns for run in weight.runs)
        for part in weight.runs:
            work = found[f"linear {weight.in_size} x {part.num_columns * 16}"]
            work.memory_bytes += weight.num_bytes * part.num_columns / columns
            cost = 1 if part.form == PLAIN else product.cost
            work.multiplications += cost * used * weight.in_size * part.num_columns * 16
            work.rate = "attention" if part.form == PLAIN else "integer"
    lengths, starts = batch.kv_lens[0], batch.query_starts
    attention = found["attention"]
    has_codes = memory.kv_dtype == "int8"
    attention.rate = "integer" if has_codes else "attention"
    groups = model.architecture.kv_groups()
    numbers = sum(16 * len(g.layers) * g.num_kv_heads * g.head_dim for g in groups)
    number_bytes = memory.kv_bytes_per_block / numbers
    of_heads = products[1].weight.in_size  # what the first layer's output product reads: all heads
    for group in groups:
        row_bytes = number_bytes * group.num_kv_heads * group.head_dim
        for sequence, length in enumerate(lengths):
            count = int(starts[sequence + 1] - starts[sequence])
            seen = (
                int(length)
                if group.sliding_window is None
                else min(int(length), group.sliding_window)
            )
            attention.memory_bytes += len(group.layers) * seen * row_bytes
            before = int(length) - count
            pairs = sum(min(before + place + 1, seen) for place in range(count))
            of_pair = 2 * of_heads * (2 if has_codes else 1)
            attention.multiplications += len(group.layers) * pairs * of_pair
    layers = sum(len(group.layers) for group in groups)
    inner = max(product.weight.in_size for product in products[:-1])
    found["norm"].cache_bytes = 16.0 * rows * hidden * (2 * layers + 1)
    found["quantize"].cache_bytes = 6.0 * rows * hidden * layers
    for name in ("silu", "gelu"):
        found[name].cache_bytes = 12.0 * rows * inner * layers
    found["rope"].cache_bytes = 8.0 * rows * hidden * layers
    found["embed"].cache_bytes = 5.0 * rows * hidden
    found["sample"].cache_bytes = 4.0 * samples * head.out_size
    return found


def fast_times(runner: Any, batch: ForwardBatch) -> dict[str, float]:
    """Return core seconds per kind of operation, of the best step; the draw is timed apart."""
    run(runner, [batch] * 3)
    steps = [runner.profile(batch) for _ in range(ROUNDS)]
    best = min(steps, key=lambda parts: sum(parts.values()))
    times = {name: milliseconds / 1e3 for name, milliseconds in best.items()}
    times["sample"] = min(draw_seconds(runner, batch) for _ in range(ROUNDS))
    return times


def draw_seconds(runner: Runner, batch: ForwardBatch) -> float:
    handle = runner.execute(batch)
    start = time.perf_counter()
    handle.sample()
    handle.result()
    return time.perf_counter() - start


class TimedOps:
    """CpuOps whose every call adds its wall seconds to `spent`, under the operation's name and width."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self.spent: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._ops, name)
        if not callable(call):
            return call

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            seconds = time.perf_counter() - start
            width = f" {arguments[0].shape[1]} x {result.shape[1]}" if name == "linear" else ""
            self.spent[name + width] += seconds
            return result

        return timed


def reference_times(runner: OpsRunner, ops: TimedOps, batch: ForwardBatch) -> dict[str, float]:
    """Return wall seconds per operation of the best step."""
    run(runner, [batch] * 2)
    found: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        ops.spent.clear()
        run(runner, [batch])
        found.append(dict(ops.spent))
    return min(found, key=lambda parts: sum(parts.values()))


SAME = {
    "norm": ("rms_norm", "add_rms_norm"),
    "rope": ("rope_write_kv",),
    "attention": ("paged_attention",),
    "silu": ("silu_mul",),
    "gelu": ("gelu_mul",),
}
"""The fast path's names of what the reference path calls otherwise."""


def show(
    times: Mapping[str, float],
    work: Mapping[str, Work],
    machine: Machine,
    threads: int,
) -> None:
    """Print a line per operation: core time, the least core time, what bounds it, and the share reached."""
    total = sum(times.values())
    named = {other: name for name, others in SAME.items() for other in others}
    merged: dict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        merged[named.get(name, name)] += seconds
    print(f"  {'operation':28}{'core ms':>9}{'of step':>9}{'least':>9}  bound by    reached")
    for name, seconds in sorted(merged.items(), key=lambda item: -item[1]):
        task = work.get(name)
        line = f"  {name:28}{1e3 * seconds:9.3f}{100 * seconds / total:8.1f}%"
        if task is not None and seconds > 0:
            least, bound = task.seconds(machine)
            line += (
                f"{1e3 * threads * least:9.3f}  {bound:12}{100 * threads * least / seconds:6.0f} %"
            )
        print(line)
    print(f"  {'all':28}{1e3 * total:9.3f}")


def measure_machine(threads: int) -> Machine:
    machine = Machine(
        memory=read_bandwidth(threads),
        cache=read_bandwidth(threads, CACHED_BYTES),
        integer=multiplications(threads, "integer"),
        attention=multiplications(threads, "attention"),
    )
    integer, attention = RATES["integer"][2], RATES["attention"][2]
    print(
        f"{threads} threads: memory {machine.memory / 1e9:.1f} GB/s, second-level cache "
        f"{machine.cache / 1e9:.0f} GB/s, {integer} {machine.integer / 1e9:.0f} and {attention} "
        f"{machine.attention / 1e9:.0f} G multiplications/s"
    )
    return machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--path", choices=("fast", "reference", "both"), default="fast")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--activations", choices=tuple(SHARES), default="mixed")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    threads = options.threads
    machine = measure_machine(threads)
    settings = EngineSettings(
        num_threads=threads, max_model_len=4096, activations=options.activations,
        may_choose_kv_dtype=True,
    )  # fmt: skip
    CpuBackend.open(0, None, SystemClock())
    model = load(options.model)
    from headrace.backends.cpu.fast.runner import FastRunner

    products: list[Product] = []
    with noted_products(products, options.activations):
        fast = FastRunner(model, SingleRank(), settings)
    if fast._program.head:  # all cases are greedy: the head multiplies 8 bits (see kernels_pick)
        products[-1] = replace(products[-1], plan=None)
    ops = TimedOps(CpuOps(settings))
    slow = None
    if options.path != "fast":
        slow = OpsRunner(ops, model, SingleRank(), settings, schemes=CpuOps.schemes)  # type: ignore[arg-type]
    for runner in (fast, slow):
        if runner is not None:
            runner.allocate(64 * (CONTEXT // 16 + 2))
            runner.warm_up(lambda fraction: None)
    for name in options.cases.split(","):
        batch = CASES[name]()
        if options.path != "reference":
            print(f"{name}, fast path")
            times = fast_times(fast, batch)
            times["sample"] *= threads
            show(times, work_of(model, products, batch, fast.memory()), machine, threads)
        if slow is not None:
            print(f"{name}, reference path")
            times = {
                key: threads * value for key, value in reference_times(slow, ops, batch).items()
            }
            whole = [replace(product, plan=None) for product in products]
            show(times, work_of(model, whole, batch, slow.memory()), machine, threads)
    for runner in (fast, slow):
        if runner is not None:
            runner.close()


if __name__ == "__main__":
    main()
