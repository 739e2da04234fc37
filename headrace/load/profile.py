"""Measures how long an engine's steps take, and what engine and gateway add: the facts a simulator needs.

The file is JSON: the raw samples, the coefficients of headrace.step_time's formula fitted to them, and
what scheduling depends on. docs/benchmarks.md lists its fields.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.build import open_runner
from headrace.clock import SystemClock
from headrace.config import ReplicaConfig
from headrace.errors import ConfigError
from headrace.load.overheads import Report, measure_overheads
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.step_time import StepTimeFormula
from headrace.types import EngineSettings

if TYPE_CHECKING:
    from headrace.interfaces import BesideRunner, LoadedModel, Runner
    from headrace.types import ForwardBatch

Sample = dict[str, float]

FORMAT = "headrace-step-profile-1"
SEQUENCES = (1, 2, 3, 4, 6, 8, 16, 32, 64)
CONTEXTS = (64, 512, 2048)
CHUNKS = (16, 64, 128, 256, 512)
REPEATS = 11
_FEWEST_SAMPLES = 4
"""Of steps, one for each coefficient."""
_STEPS_BESIDE = 4
"""Steps of a measurement beside the caller."""


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
    if len(samples) < _FEWEST_SAMPLES:
        raise ConfigError(
            f"--profile: only {len(samples)} shapes of steps fit max_model_len {settings.max_model_len}, "
            f"max_batched_tokens {settings.max_batched_tokens} and {num_blocks} blocks, too few to fit "
            "step times to; give models.0.engine.max_model_len and max_batched_tokens 128 or more"
        )
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
            "kv_dtype": memory.kv_dtype or settings.kv_dtype,
            "block_size": settings.block_size,
            "num_blocks": num_blocks,
            "max_model_len": settings.max_model_len,
            "max_num_sequences": settings.max_num_sequences,
            "max_batched_tokens": settings.max_batched_tokens,
        },
        "step_time": asdict(formula),
        "fit": {"mean_relative_error": mean_relative_error(formula, samples)},
        "overhead": measure_overheads(config, serve_arguments, report),
        "samples": samples,
    }


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
    beside: list[list[float]] = [[] for _ in shapes]
    for round_index in range(repeats + 1):
        report("profile", round_index / (repeats + 1))
        for steps, batch, found, ahead in zip(shapes, batches, seconds, beside, strict=True):
            start = time.perf_counter()
            handle = runner.execute(batch)
            handle.sample()
            handle.result()
            found.append(time.perf_counter() - start)
            if hasattr(runner, "execute_beside") and all(len(s.token_ids) == 1 for s in steps):
                beside_caller = cast("BesideRunner", runner)
                if ahead or beside_caller.runs_beside(len(steps), int(batch.kv_lens[0].sum())):
                    ahead.append(seconds_beside(beside_caller, batch))
    samples = []
    for steps, found, ahead in zip(shapes, seconds, beside, strict=True):
        counts = [len(step.token_ids) for step in steps]
        samples.append(
            {
                "prefill_tokens": sum(count for count in counts if count > 1),
                "sequences": len(steps),
                "kv_rows": sum(step.num_computed + len(step.token_ids) for step in steps),
                "seconds": middle_mean(found[1:]),
            }
        )
        if ahead:
            samples[-1]["beside_seconds"] = middle_mean(ahead[1:])
    return samples


def seconds_beside(runner: BesideRunner, batch: ForwardBatch) -> float:
    """Return the mean seconds between results of equal steps, each launched before the last one is done."""
    handles = deque(runner.execute_beside(batch) for _ in range(2))
    handles.popleft().result()
    start = time.perf_counter()
    for _ in range(_STEPS_BESIDE):
        handles.append(runner.execute_beside(batch))
        handles.popleft().result()
    found = (time.perf_counter() - start) / _STEPS_BESIDE
    handles.popleft().result()
    return found


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
