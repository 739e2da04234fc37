"""Measures how long an engine's steps take, and what engine and gateway add: the facts a simulator needs.

The file is JSON: the raw samples, the coefficients of headrace.step_time's formula fitted to them, and
what scheduling depends on. docs/benchmarks.md lists its fields.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.build import open_runner
from headrace.clock import SystemClock
from headrace.config import ReplicaConfig
from headrace.load.client import run_load
from headrace.load.plan import Lengths, LoadPlan
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.step_time import StepTimeFormula
from headrace.testing.server import started_server
from headrace.types import EngineSettings

if TYPE_CHECKING:
    from headrace.interfaces import LoadedModel, Runner

FORMAT = "headrace-step-profile-1"
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512, 2048)
CHUNKS = (16, 64, 128, 256, 512)
REPEATS = 11
_OVERHEAD_STEPS = 200
_GATEWAY_REQUESTS, _GATEWAY_TOKENS = 64, 65
_SERVED_REQUESTS, _SERVED_PROMPT, _SERVED_OUTPUT = 24, 16, 17

Report = Callable[[str, float], None]
Sample = dict[str, float]


def measure_profile(
    data: Mapping[str, Any],
    *,
    serve_arguments: Sequence[str],
    report: Report | None = None,
) -> dict[str, Any]:
    """Return the profile of the replica that `data` (headrace.config.schema.replica_config) describes.

    Loads its model in this process and runs real steps, then starts a server over a simulated device
    for the gateway's part, and one with `serve_arguments` (`headrace serve`'s, for the same
    configuration) for what serving adds to a step. Raises what building the engine raises.
    """
    config = ReplicaConfig.from_dict(data)
    report = report or _say_nothing
    with _loaded(config, report) as (runner, model, settings, num_blocks):
        memory = runner.memory()
        samples = measure_steps(runner, settings, num_blocks, report)
    formula = fit(samples)
    return {
        "format": FORMAT,
        "model": {
            "name": config.model.name,
            "architecture": model.architecture.name,
            "backend": config.model.backend.use,
            "weight_bytes": memory.weight_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_block // settings.block_size,
        },
        "machine": {"cpu": cpu_name(), "num_threads": settings.num_threads},
        "engine": {
            "dtype": settings.dtype,
            "kv_dtype": settings.kv_dtype,
            "block_size": settings.block_size,
            "num_blocks": num_blocks,
            "max_model_len": settings.max_model_len,
            "max_num_sequences": settings.max_num_sequences,
            "max_batched_tokens": settings.max_batched_tokens,
        },
        "step_time": asdict(formula),
        "fit": {"mean_relative_error": mean_relative_error(formula, samples)},
        "overhead": measure_overhead()
        | measure_gateway(config, report)
        | measure_served(serve_arguments, samples, report),
        "samples": samples,
    }


def measure_again(
    data: Mapping[str, Any], profile: Mapping[str, Any], repeats: int
) -> list[Sample]:
    """Return the samples of a profile as the machine is now, without what gateway and engine add."""
    with _loaded(ReplicaConfig.from_dict(data), _say_nothing) as (runner, _, settings, num_blocks):
        samples = measure_steps(runner, settings, num_blocks, _say_nothing, repeats)
    assert len(samples) == len(profile["samples"]), "the profile is of another configuration"
    return samples


def _say_nothing(stage: str, fraction: float) -> None:
    """For whoever shows no progress."""


@contextmanager
def _loaded(
    config: ReplicaConfig, report: Report
) -> Iterator[tuple[Runner, LoadedModel, EngineSettings, int]]:
    manager = create_plugin_manager(
        discover=config.plugins.discover, blocked=config.plugins.blocked
    )
    opened = open_runner(config, Registries.from_manager(manager), SystemClock(), report)
    try:
        yield opened
    finally:
        opened[0].close()


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure_steps(
    runner: Runner,
    settings: EngineSettings,
    num_blocks: int,
    report: Report,
    repeats: int = REPEATS,
) -> list[Sample]:
    """Return a sample per shape of step: what it computes, and the mean seconds of `repeats` runs.

    The rounds go through all shapes, so that a busy moment of the machine touches one run of each. The
    quarter at either end is left out; a median would take a machine that is fast at one time and slow
    at another for one of the two.
    """
    shapes = list(step_shapes(settings, num_blocks))
    groups = len(runner.kv_groups())
    batches = [
        forward_batch(
            steps,
            block_size=settings.block_size,
            num_groups=groups,
            sampling=sampling_batch(len(steps)),
        )
        for steps in shapes
    ]
    seconds: list[list[float]] = [[] for _ in shapes]
    for round_index in range(repeats + 1):
        report("profile", round_index / (repeats + 1))
        for batch, found in zip(batches, seconds, strict=True):
            start = time.perf_counter()
            handle = runner.execute(batch)
            handle.sample()
            handle.result()
            found.append(time.perf_counter() - start)
    samples = []
    for steps, found in zip(shapes, seconds, strict=True):
        counts = [len(step.token_ids) for step in steps]
        samples.append(
            {
                "prefill_tokens": sum(count for count in counts if count > 1),
                "sequences": len(steps),
                "kv_rows": sum(step.num_computed + len(step.token_ids) for step in steps),
                "seconds": middle_mean(found[1:]),
            }
        )
    return samples


def middle_mean(seconds: Sequence[float]) -> float:
    """Return the mean of those that are left without the quarter at either end."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


def step_shapes(settings: EngineSettings, num_blocks: int) -> Iterator[list[SequenceStep]]:
    """Yield decodes, chunks of prompts and both together, as far as settings and pool allow them."""
    size = settings.block_size
    asked = [([context] * rows, 0, 0) for rows in SEQUENCES for context in CONTEXTS]
    asked += [([], chunk, done) for chunk in CHUNKS for done in (0, *CONTEXTS[1:])]
    asked += [([256] * rows, chunk, 0) for rows in (4, 16) for chunk in (128, 384)]
    for contexts, chunk, done in asked:
        jobs = [(1, context) for context in contexts] + ([(chunk, done)] if chunk else [])
        blocks = [-(-(count + before) // size) for count, before in jobs]
        fits = (
            sum(blocks) <= num_blocks
            and len(jobs) <= settings.max_num_sequences
            and sum(count for count, _ in jobs) <= settings.max_batched_tokens
            and all(count + before <= settings.max_model_len for count, before in jobs)
        )
        if not fits:
            continue
        free = iter(range(num_blocks))
        yield [
            SequenceStep([1] * count, before, [next(free) for _ in range(needed)])
            for (count, before), needed in zip(jobs, blocks, strict=True)
        ]


def fit(samples: Sequence[Sample]) -> StepTimeFormula:
    """Return the formula of least relative squared error, no coefficient below 0.

    A coefficient that comes out negative is set to 0 and the others are fitted again.
    """
    seconds = np.array([sample["seconds"] for sample in samples])
    names = ("prefill_tokens", "sequences", "kv_rows")
    columns = [np.ones(len(samples))]
    columns += [np.array([sample[name] for sample in samples], float) for name in names]
    table = np.stack(columns, axis=1) / seconds[:, None]
    kept = list(range(table.shape[1]))
    weights = np.zeros(table.shape[1])
    while kept:
        scales = np.maximum(np.abs(table[:, kept]).max(axis=0), 1e-300)
        found = np.linalg.lstsq(table[:, kept] / scales, np.ones(len(samples)), rcond=None)[0]
        found /= scales
        if found.min() >= 0:
            weights[kept] = found
            break
        kept.pop(int(np.argmin(found * scales)))
    return StepTimeFormula(*(float(weight) for weight in weights))


def mean_relative_error(formula: StepTimeFormula, samples: Sequence[Sample]) -> float:
    """Return the mean of |predicted - measured| / measured."""
    errors = []
    for sample in samples:
        counts = (int(sample[name]) for name in ("prefill_tokens", "sequences", "kv_rows"))
        errors.append(abs(formula.seconds(*counts) / sample["seconds"] - 1.0))
    return float(np.mean(errors))


def measure_overhead() -> dict[str, float]:
    """Return what the engine adds to a step: seconds, and seconds per sequence.

    A device that takes no time leaves planning, arrays, outcome and text. Its tokens are made up by
    NumPy in some ten microseconds, which count as the engine's.
    """
    one, many = engine_seconds(1), engine_seconds(32)
    per_sequence = max(0.0, (many - one) / 31)
    return {
        "engine_seconds_per_step": max(0.0, one - per_sequence),
        "engine_seconds_per_sequence": per_sequence,
    }


def engine_seconds(num_sequences: int) -> float:
    """Return the median seconds of a step of so many decodes on a device that takes no time."""
    from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
    from headrace.testing.engine_driver import drive_runner, driver_tokenizer
    from headrace.types import KVGroupSpec

    vocab_size = driver_tokenizer().vocab_size
    settings = EngineSettings(max_model_len=1024, max_num_sequences=num_sequences)
    runner = SimulatedRunner(
        groups=(KVGroupSpec(name="all", layers=(0,), num_kv_heads=1, head_dim=16),),
        vocab_size=vocab_size,
        settings=settings,
        clock=SystemClock(),
        device=SimulatedDevice(StepTimeFormula()),
    )
    driver = drive_runner(runner, settings, 64 * num_sequences, vocab_size)
    for row in range(num_sequences):
        driver.submit([row + 1] * 8, max_tokens=1000)
    for _ in range(8):
        driver.engine.step()
    found = []
    for _ in range(_OVERHEAD_STEPS):
        start = time.perf_counter()
        driver.engine.step()
        found.append(time.perf_counter() - start)
    return median(found)


def measure_gateway(config: ReplicaConfig, report: Report) -> dict[str, float | None]:
    """Return the gateway process's seconds of core time per request and per streamed token.

    None where the system does not tell a process's time (it is read from Linux's /proc).
    """
    arguments = ["--model", config.model.source, "--set", "models.0.backend.use=simulated"]
    arguments += ["--set", "models.0.backend.options.base_seconds=0.001"]
    report("gateway", 0.0)
    spent = []
    with started_server(arguments) as server:
        plan = LoadPlan(url=server.url, concurrency=8, num_requests=_GATEWAY_REQUESTS)
        for seed, tokens in enumerate((1, 1, _GATEWAY_TOKENS)):
            before = core_seconds(server.process.pid)
            asked = replace(plan, output_tokens=Lengths.fixed(tokens), seed=seed)
            anyio.run(run_load, asked)
            after = core_seconds(server.process.pid)
            spent.append(None if before is None or after is None else after - before)
            report("gateway", (seed + 1) / 3)
    if spent[1] is None or spent[2] is None:
        return {"gateway_seconds_per_request": None, "gateway_seconds_per_token": None}
    extra = _GATEWAY_REQUESTS * (_GATEWAY_TOKENS - 1)
    per_token = max(0.0, (spent[2] - spent[1]) / extra)
    return {
        "gateway_seconds_per_request": max(0.0, spent[1] / _GATEWAY_REQUESTS - per_token),
        "gateway_seconds_per_token": per_token,
    }


def measure_served(
    serve_arguments: Sequence[str], samples: Sequence[Sample], report: Report
) -> dict[str, float]:
    """Return how much longer a decode and a first token take in a server than alone; at least 0 s.

    The engine's own part is in it, and what gateway and client take from the cores that compute.
    """
    report("served steps", 0.0)
    with started_server(serve_arguments) as server:
        plan = LoadPlan(
            url=server.url,
            concurrency=1,
            num_requests=_SERVED_REQUESTS,
            prompt_tokens=Lengths.fixed(_SERVED_PROMPT),
            output_tokens=Lengths.fixed(_SERVED_OUTPUT),
        )
        for seed in range(2):  # the first warms it up
            found = anyio.run(run_load, replace(plan, seed=seed))
    tpot, ttft = found.percentile("tpot", 0.5), found.percentile("ttft", 0.5)
    assert tpot is not None and ttft is not None, "a server that is ready answers"
    report("served steps", 1.0)
    alone = first_chunk(samples, _SERVED_PROMPT)
    return {
        "served_seconds_per_step": max(0.0, tpot - shortest_decode(samples)),
        "served_seconds_per_request": 0.0 if alone is None else max(0.0, ttft - alone),
    }


def shortest_decode(samples: Sequence[Sample]) -> float:
    """Return the seconds of the measured decode of one sequence with the fewest rows."""
    decodes = [each for each in samples if each["prefill_tokens"] == 0 and each["sequences"] == 1]
    return min(decodes, key=lambda each: each["kv_rows"])["seconds"]


def first_chunk(samples: Sequence[Sample], num_tokens: int) -> float | None:
    """Return the seconds of a prompt's first chunk, between the sizes that were measured; None: none was."""
    alone = {
        each["prefill_tokens"]: each["seconds"]
        for each in samples
        if each["sequences"] == 1 and each["prefill_tokens"] == each["kv_rows"]
    }
    if not alone:
        return None
    sizes = sorted(alone)
    return float(np.interp(num_tokens, sizes, [alone[size] for size in sizes]))


def core_seconds(pid: int) -> float | None:
    """Return the core time that a process's threads have taken, in seconds; None where unknown."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        return None
