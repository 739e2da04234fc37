"""Whether results are right: every case on the device, recorded decode steps, and what the sanitizers say."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.cases import (
    ATTENTION_CASES,
    TOLERANCE,
    AttentionCase,
    attention_problem,
    check_nan_stays,
)
from gpu.row_cases import DRAW_CASES, ROW_CASES, draw_small

from gpu_check.stage import Stage, checkpoint_of, reason_of

GRAPH_TOLERANCE = 2e-2
"""Replayed against eager logits, over the largest: products in bf16 may be summed in another order."""
SANITIZER_TOOLS = ("memcheck", "racecheck")
SANITIZED_ATTENTION = ("short appends", "tiles: few", "fp8")
SANITIZED_ROWS = ("norm per head", "rope, fp8", "linear int8, 8 tokens")
FOUND_ERRORS = 86


def check_cases(stage: Stage) -> None:
    """Hold every case of attention, row operations and draws against float64."""
    sizes = stage.sizes
    stage.told(
        "device", f"{stage.device.name}, {stage.device.architecture}, torch {torch.__version__}"
    )
    for case in ATTENTION_CASES[: sizes.attention_cases]:
        _one(stage, f"attention: {case.name}", functools.partial(_attend, stage, case))
    _one(stage, "attention: NaN stays in its sequence", functools.partial(_nan_stays, stage))
    for name, check in [
        *itertools.islice(ROW_CASES.items(), sizes.row_cases),
        *itertools.islice(DRAW_CASES.items(), sizes.row_cases),
    ]:
        _one(stage, f"rows: {name}", functools.partial(_row, stage, check))


def _one(stage: Stage, name: str, check: Callable[[], str]) -> None:
    """Run one check: what it raises is its verdict, and the next one still runs."""
    try:
        stage.judged(name, True, check())
    except Exception as error:
        stage.judged(name, False, reason_of(error))


def _attend(stage: Stage, case: AttentionCase) -> str:
    problem = attention_problem(case, device=str(stage.torch_device))
    error = problem.error(problem.answer(stage.kernels))
    allowed = TOLERANCE[case.activation]
    assert error < allowed, f"off by {error:.1e}, allowed are {allowed:.1e}"
    return f"{error:.1e}"


def _nan_stays(stage: Stage) -> str:
    check_nan_stays(stage.kernels, str(stage.torch_device))
    return ""


def _row(stage: Stage, check: Callable[[Any], None]) -> str:
    """The cases make their tensors on torch's default device."""
    torch.set_default_device(stage.torch_device)
    try:
        check(stage.kernels)
        stage.device.synchronize()
    finally:
        torch.set_default_device(None)
    return ""


# --- recorded decode steps --------------------------------------------------------------


def check_graphs(stage: Stage) -> None:
    """Hold recorded decode steps against eager ones: a bucket by itself, then all of a runner's in turn."""
    from headrace.backends.gpu.ops import GpuOps
    from headrace.backends.gpu.runner import GpuRunner
    from headrace.group import SingleRank
    from headrace.testing.model_driver import open_checkpoint
    from headrace.types import EngineSettings

    settings = EngineSettings(
        dtype="bfloat16", kv_dtype="bfloat16", max_model_len=256, max_num_sequences=4,
        max_batched_tokens=16,
    )  # fmt: skip
    ops = GpuOps(stage.kernels, stage.device, settings, stage.backend)
    runner: Any = GpuRunner(ops, open_checkpoint(checkpoint_of("")), SingleRank(), settings)
    runner.allocate(64)
    runner.warm_up(lambda fraction: None)
    recorded, runner._decode_steps = dict(runner._decode_steps), {}
    steps = _prefill(runner, [[40, 77, 12], [9, 8, 7, 6, 5], [200, 3]])
    _check_one_bucket(stage, ops, runner, steps)
    if sorted(recorded) != [1, 2, 4]:
        raise RuntimeError(f"of buckets 1, 2 and 4, {sorted(recorded)} were recorded: see the log")
    for count, num_sequences in enumerate((3, 1, 2, 3)):
        batch = steps(count, num_sequences)
        runner._decode_steps = recorded
        replayed = runner.execute(batch)._logits.clone()
        runner._decode_steps = {}
        expected = runner.execute(batch)._logits.clone()
        stage.device.synchronize()
        name = f"runner's step {count} of {num_sequences} equals eager"
        stage.judged(name, *_compared(replayed, expected))
    runner.close()


def _check_one_bucket(stage: Stage, ops: Any, runner: Any, steps: Callable[..., Any]) -> None:
    """The eager step has the same shape as the recorded one, filling included."""
    from headrace.backends.gpu.graphs import DecodeStep

    recorded, eager = (DecodeStep(ops, 4, 256 // 16) for _ in range(2))
    recorded.fill(steps(0))
    recorded.run(runner._forward, 3)
    stage.device.synchronize()
    recorded.capture(runner._forward)
    for count in range(3):
        recorded.fill(steps(count))
        replayed = recorded.run(runner._forward, 3).clone()
        eager.fill(steps(count))
        expected = eager.run(runner._forward, 3).clone()
        stage.device.synchronize()
        stage.judged(f"replayed step {count} equals eager", *_compared(replayed, expected))


def _prefill(runner: Any, prompts: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """Compute the prompts; return what gives the batch of decode step n, a token of the first sequences."""
    from headrace.backends.batches import SequenceStep, forward_batch

    tables = [[3 * index + 2, 3 * index + 1] for index in range(len(prompts))]
    for prompt, table in zip(prompts, tables, strict=True):
        handle = runner.execute(forward_batch([SequenceStep(prompt, 0, table)], block_size=16))
        handle.sample()
        handle.result()

    def step(count: int, num_sequences: int = len(prompts)) -> Any:
        rows = [
            SequenceStep([11 + 7 * count + index], len(prompt) + count, table)
            for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        return forward_batch(rows[:num_sequences], block_size=16)

    return step


def _compared(got: torch.Tensor, expected: torch.Tensor) -> tuple[bool, str]:
    if torch.equal(got, expected):
        return bool(got.isfinite().all()), "the same bits"
    difference = float((got - expected).abs().max() / expected.abs().max())
    return difference < GRAPH_TOLERANCE, f"off by {difference:.1e} of the largest logit"


# --- sanitizers -------------------------------------------------------------------------


def sanitizer_path(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return compute-sanitizer: on the PATH, or where CUDA's toolkit is."""
    folders = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(folder) / "bin") for folder in folders if folder]
    return shutil.which("compute-sanitizer", path=environ.get("PATH")) or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def check_sanitizers(stage: Stage) -> None:
    """Run a few small cases under memcheck and racecheck, each in a process of its own."""
    tool = "" if stage.is_dry else sanitizer_path()
    for name in SANITIZER_TOOLS:
        if tool is None:
            stage.skipped(name, "compute-sanitizer is not installed: it comes with CUDA's toolkit")
            continue
        done = subprocess.run(
            sanitizer_command(tool, name, stage), capture_output=True, text=True, check=False,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        told = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
        note = told[-1].strip("= ") if told else ""
        if done.returncode == 0:
            stage.judged(name, True, "a dry run: under no sanitizer" if stage.is_dry else note)
        elif done.returncode == FOUND_ERRORS:
            stage.judged(name, False, told[1].strip("= ") if len(told) > 1 else note)
        else:
            last = (done.stderr.strip().splitlines() or [note])[-1]
            stage.failed(name, RuntimeError(f"exit status {done.returncode}: {last}"))


def sanitizer_command(tool: str, name: str, stage: Stage) -> list[str]:
    """Return what runs `sanitized` below under a tool of compute-sanitizer; "": under none."""
    script = Path(__file__).resolve().parent.parent / "gpu-check"
    child = [sys.executable, str(script), "--section", "sanitized", "--backend", stage.backend]
    child += ["--dry-run"] if stage.is_dry else []
    options = ["--tool", name, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "5"]
    return [tool, *options, *child] if tool else child


def run_sanitized(stage: Stage) -> None:
    """The cases themselves: both attention kernels, merges, writes of rows, products and the draw."""
    attention = {case.name: case for case in ATTENTION_CASES}
    for name in SANITIZED_ATTENTION[: stage.sizes.attention_cases]:
        _one(stage, f"attention: {name}", functools.partial(_attend, stage, attention[name]))
    checks = {name: ROW_CASES[name] for name in SANITIZED_ROWS} | {"draw_small": draw_small}
    for name, check in itertools.islice(checks.items(), stage.sizes.row_cases):
        _one(stage, f"rows: {name}", functools.partial(_row, stage, check))
