"""Measures what engine and gateway add to what a model's steps take: for headrace.load.profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import anyio
import numpy as np

from headrace.clock import SystemClock
from headrace.config import ReplicaConfig
from headrace.load.client import run_load
from headrace.load.plan import Lengths, LoadPlan
from headrace.load.report import LoadReport
from headrace.step_time import StepTimeFormula
from headrace.testing.server import started_server
from headrace.types import EngineSettings

Report = Callable[[str, float], None]
Sample = dict[str, float]

_OVERHEAD_STEPS = 200
_GATEWAY_REQUESTS, _GATEWAY_TOKENS = 64, 65
_SERVED_REQUESTS, _SERVED_PROMPT, _SERVED_OUTPUT = 24, 16, 49
_SERVED_TOGETHER, _SERVED_RATE = 8, 3.0
"""Sequences decoded together, and requests per second where each finds an idle server."""


def measure_overheads(
    config: ReplicaConfig, serve_arguments: Sequence[str], samples: Sequence[Sample], report: Report
) -> dict[str, float | None]:
    """Return what engine and gateway add to steps and requests."""
    found = measure_overhead() | measure_gateway(config, report)
    per_sequence = found["engine_seconds_per_sequence"] or 0.0
    per_sequence += found["gateway_seconds_per_token"] or 0.0
    return found | measure_served(serve_arguments, samples, per_sequence, report)


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
    serve_arguments: Sequence[str],
    samples: Sequence[Sample],
    seconds_per_sequence: float,
    report: Report,
) -> dict[str, float]:
    """Return how much longer decodes and a first token take in a server than alone; at least 0 s.

    The engine's own part is in it, and what gateway and client take from the cores that compute. Of
    decodes: a few sequences together, whose steps follow what the engine does in between, and one alone.
    `seconds_per_sequence` is known to be added for each of those.
    """
    report("served steps", 0.0)
    tpots: dict[int, float] = {}
    with started_server(serve_arguments) as server:
        plan = LoadPlan(
            url=server.url,
            num_requests=_SERVED_REQUESTS,
            prompt_tokens=Lengths.fixed(_SERVED_PROMPT),
            output_tokens=Lengths.fixed(_SERVED_OUTPUT),
        )
        for seed, count in enumerate((1, _SERVED_TOGETHER, 1)):  # the first warms it up
            found = anyio.run(run_load, replace(plan, concurrency=count, seed=seed))
            tpots[count] = _middle(found, "tpot")
            report("served steps", (seed + 1) / 4)
        asked = replace(plan, request_rate=_SERVED_RATE, burstiness=math.inf, seed=3)
        ttft = _middle(anyio.run(run_load, asked), "ttft")
        report("served steps", 1.0)
    alone = first_chunk(samples, _SERVED_PROMPT)
    together, beside = (shortest_decode(samples, count) for count in (_SERVED_TOGETHER, 1))
    return {
        "served_seconds_per_step": max(
            0.0,
            tpots[_SERVED_TOGETHER]
            - together["seconds"]
            - together["sequences"] * seconds_per_sequence,
        ),
        "served_seconds_beside": max(
            0.0, tpots[1] - beside.get("beside_seconds", beside["seconds"])
        ),
        "served_seconds_per_request": 0.0 if alone is None else max(0.0, ttft - alone),
    }


def _middle(found: LoadReport, latency: str) -> float:
    middle = found.percentile(latency, 0.5)
    assert middle is not None, "a server that is ready answers"
    return middle


def shortest_decode(samples: Sequence[Sample], num_sequences: int) -> Sample:
    """Return the measured decode of so many sequences, or the most below, with the fewest rows."""
    decodes = [each for each in samples if each["prefill_tokens"] == 0]
    count = max(each["sequences"] for each in decodes if each["sequences"] <= num_sequences)
    return min(
        (each for each in decodes if each["sequences"] == count), key=lambda each: each["kv_rows"]
    )


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
