"""Measures what engine and gateway add to what a model's steps take: for headrace.load.profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from headrace.clock import SystemClock
from headrace.config import ReplicaConfig
from headrace.errors import HeadraceError
from headrace.load.client import run_load
from headrace.load.plan import Lengths, LoadPlan
from headrace.load.recording import (
    gaps_between_decodes,
    read_steps,
    seconds_until_seen,
    with_recording,
)
from headrace.load.report import LoadReport
from headrace.step_time import StepTimeFormula
from headrace.testing.server import started_server
from headrace.types import EngineSettings

Report = Callable[[str, float], None]

_OVERHEAD_STEPS = 200
_GATEWAY_REQUESTS, _GATEWAY_TOKENS = 64, 65
_SERVED_REQUESTS, _SERVED_PROMPT, _SERVED_OUTPUT = 24, 16, 49
_SERVED_TOGETHER, _SERVED_RATE = (1, 2, 3, 4, 8, 16), 1.5
"""Sequences decoded together, and requests per second where each finds an idle server."""
_FEWEST_GAPS = 20


def measure_overheads(
    config: ReplicaConfig, serve_arguments: Sequence[str], report: Report
) -> dict[str, Any]:
    """Return what engine and gateway add to steps and requests."""
    found = measure_overhead() | measure_gateway(config, report)
    return found | measure_served(config, serve_arguments, report)


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
    config: ReplicaConfig, serve_arguments: Sequence[str], report: Report
) -> dict[str, Any]:
    """Return what passes between two steps of decodes in a server, and how late a first token comes.

    Both beside what the steps themselves take in that very run, so that a machine that is faster at one time
    than at another spoils neither. The engine's own part is in it, and what waits for gateway and client.
    HeadraceError where the server cannot be started or answers no request.
    """
    report("served steps", 0.0)
    model_len = config.model.engine.max_model_len
    output = _SERVED_OUTPUT
    if model_len != "auto":
        output = max(1, min(output, model_len - _SERVED_PROMPT))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        with started_server(with_recording(serve_arguments, file)) as server:
            plan = LoadPlan(
                url=server.url,
                model=config.model.name,
                num_requests=_SERVED_REQUESTS,
                prompt_tokens=Lengths.fixed(_SERVED_PROMPT),
                output_tokens=Lengths.fixed(output),
            )
            for seed, count in enumerate((1, *_SERVED_TOGETHER)):  # the first warms it up
                num_requests = max(_SERVED_REQUESTS, 3 * count)
                asked = replace(plan, concurrency=count, num_requests=num_requests, seed=seed)
                _checked(anyio.run(run_load, asked))
                report("served steps", (seed + 1) / (len(_SERVED_TOGETHER) + 2))
            gaps = gaps_between_decodes(read_steps(file))
            asked = replace(plan, request_rate=_SERVED_RATE, burstiness=math.inf, seed=99)
            found = _checked(anyio.run(run_load, asked))
            late = seconds_until_seen(found, read_steps(file))
        report("served steps", 1.0)
    return {
        "served_gaps": [
            [count, median(seconds)]
            for count, seconds in sorted(gaps.items())
            if len(seconds) >= _FEWEST_GAPS
        ],
        "served_seconds_per_request": max(0.0, median(late)) if late else 0.0,
    }


def _checked(found: LoadReport) -> LoadReport:
    if found.errors:
        raise HeadraceError(
            "the served steps cannot be measured: a request to the server of this configuration failed: "
            f"{found.errors[0]}. Keys are not given here: leave gateway.api_keys_* out of the configuration"
        )
    return found


def core_seconds(pid: int) -> float | None:
    """Return the core time that a process's threads have taken, in seconds; None where unknown."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        return None
