"""How near the simulator comes to a real server: three traces replayed on both, latencies side by side.

    python benchmarks/fidelity.py --model smollm2 --profile profile.json

Measures the machine's step times first where the profile does not exist yet (three minutes). A processor
that clocks its vector units by what its neighbours do is a third slower in one second than in the next, and
what is asked here is whether the simulator is right about the machine as it was. So the server writes its steps
down, and the simulator is told how much longer they took than by the profile, half second by half second
(machine_speed.py): not when requests waited, nor what a step had to compute. The table has the errors with this
and without. Each trace has a server of its own. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
from machine_speed import MachineSpeed

from headrace.cli.simulate import make_setup
from headrace.config import load_config, parse_assignments
from headrace.config.schema import replica_config
from headrace.load import LoadPlan, LoadReport, PlannedRequest, run_load
from headrace.load.profile import measure_profile
from headrace.load.recording import read_steps, with_recording
from headrace.load.report import FRACTIONS, percentile
from headrace.simulator.figures import latencies
from headrace.simulator.hardware import Hardware, from_document, from_profile
from headrace.simulator.outcomes import Outcomes
from headrace.simulator.prompts import PromptMaker
from headrace.simulator.simulation import simulate
from headrace.simulator.trace import HASH_BLOCK_TOKENS, Trace, TraceRequest, in_order
from headrace.step_time import StepTime
from headrace.testing.server import started_server

_SHARED_TOKENS = 2 * HASH_BLOCK_TOKENS
_WARM_UP_REQUESTS = 8
_LOWEST_ID, _NUM_IDS = 100, 40_000
SHAPES = {
    "chat": ((60, 0.8, 400), (40, 0.7, 160), 0),
    "code": ((200, 0.6, 1200), (12, 0.6, 40), 0),
    "shared": ((60, 0.6, 300), (24, 0.6, 96), 4),
}
"""Chats, completions of code, and questions behind shared beginnings: (median, spread, most) of prompt and
output tokens, and how many beginnings."""
_COLUMNS = (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"), ("tpot", "p90"))


def make_trace(name: str, hardware: Hardware, seconds: float, load: float, seed: int) -> Trace:
    """Return requests that keep a server busy for about `load` of the time, by the profile's step times."""
    prompt, output, num_prefixes = SHAPES[name]
    rng = random.Random(f"{name} {seed}")
    requests: list[TraceRequest] = []
    seen: set[int] = set()
    at = 0.0
    while at < seconds:
        own, num_output = _length(rng, *prompt), _length(rng, *output)
        ids: tuple[int, ...] = ()
        num_new = length = own
        if num_prefixes:
            first = 1000 * (1 + rng.randrange(num_prefixes))
            ids = (first, first + 1, 100_000 + len(requests))
            length += _SHARED_TOKENS
            num_new += 0 if first in seen else _SHARED_TOKENS
            seen.add(first)
        requests.append(TraceRequest(at, length, num_output, ids))
        cost = hardware.step_time.seconds(num_new, 1, length)
        cost += num_output * hardware.step_time.seconds(0, 4, 4 * length) / 4
        at += rng.expovariate(1 / (cost / load))
    return in_order(name, requests)


def _length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(2, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def warm_up(url: str) -> None:
    """Send a few requests that count for nothing."""
    requests = [PlannedRequest([7] * (20 + n), 8) for n in range(_WARM_UP_REQUESTS)]

    async def run() -> None:
        await run_load(LoadPlan(url=url, num_requests=len(requests)), requests=requests)

    anyio.run(run)


def replay(url: str, trace: Trace, block_size: int) -> LoadReport:
    """Send a trace to a server, prompts as token ids."""
    maker = PromptMaker(block_size, "")
    planned = []
    for request in trace.requests:
        tokens, _ = maker.make(request)
        ids = [_LOWEST_ID + token % _NUM_IDS for token in tokens]
        planned.append(PlannedRequest(ids, request.num_output_tokens, request.at))

    async def run() -> LoadReport:
        plan = LoadPlan(url=url, request_rate=1.0, num_requests=len(planned))
        return await run_load(plan, requests=planned)

    return anyio.run(run)


@dataclass(slots=True)
class Latencies:
    """TTFT and TPOT of a trace's requests, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)

    def add_real(self, report: LoadReport) -> None:
        assert not report.errors, f"a request failed: {report.errors[0]}"
        self.ttft += report.seconds("ttft")
        self.tpot += report.seconds("tpot")

    def add_simulated(self, outcomes: Outcomes) -> None:
        ttft, tpot, _ = latencies(outcomes)
        self.ttft += ttft.tolist()
        self.tpot += tpot.tolist()


def compare(name: str, real: Latencies, simulated: Mapping[str, Latencies]) -> dict[str, Any]:
    """Return the latencies of both, in seconds, and how far the simulated ones are off, either way."""
    row: dict[str, Any] = {"trace": name, "requests": len(real.ttft)}
    for latency, column in _COLUMNS:
        found = percentile(sorted(getattr(real, latency)), FRACTIONS[column])
        cell = row[f"{latency}_{column}"] = {"real": found}
        for way, latencies_ in simulated.items():
            said = percentile(sorted(getattr(latencies_, latency)), FRACTIONS[column])
            cell |= {way: said, f"{way}_error": said / found - 1}
    return row


def served(
    flags: Sequence[str], trace: Trace, block_size: int, step_times: tuple[StepTime, StepTime]
) -> tuple[LoadReport, MachineSpeed]:
    """Return what a server made of a trace, and how fast the machine was meanwhile."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        with started_server(with_recording(flags, file)) as server:
            warm_up(server.url)
            report = replay(server.url, trace, block_size)
            steps = [step for step in read_steps(file) if step.end > report.started_at]
    return report, MachineSpeed(steps, *step_times, report.started_at)


def device_of(profile: dict[str, Any]) -> Hardware:
    """Return the device of a profile without what passes between its steps, as a server counts them."""
    names = ("engine_seconds_per_step", "engine_seconds_per_sequence")
    return from_document(profile | {"overhead": dict.fromkeys(names, 0.0)})


def simulated_at(speed: MachineSpeed, trace: Trace, run: Callable[[Trace], Outcomes]) -> Outcomes:
    """Return what became of a trace on a machine whose speed changes."""
    requests = [replace(request, at=speed.work_at(request.at)) for request in trace.requests]
    found = run(replace(trace, requests=tuple(requests)))
    outcomes = Outcomes(trace)
    outcomes.first_token_at = array("d", speed.time_at(np.array(found.first_token_at)))
    outcomes.end_at = array("d", speed.time_at(np.array(found.end_at)))
    return outcomes


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "| trace | requests | figure | server | simulator | error | at the profile's speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for latency, column in _COLUMNS:
            cell = row[f"{latency}_{column}"]
            lines.append(
                f"| {row['trace']} | {row['requests']} | {latency.upper()} {column} | "
                f"{1e3 * cell['real']:.1f} ms | {1e3 * cell['followed']:.1f} ms | "
                f"{cell['followed_error']:+.1%} | {cell['profile_error']:+.1%} |"
            )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", type=Path, default=Path("profile.json"))
    parser.add_argument("--seconds", type=float, default=240.0, help="length of each trace")
    parser.add_argument("--load", type=float, default=0.35, help="share of the time it is busy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="any key, as for serve")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    settings = [f"models.0.source={arguments.model}", *arguments.set]
    flags = [word for setting in settings for word in ("--set", setting)]
    data = replica_config(load_config(None, flags=parse_assignments(settings)).config, 0)
    if not arguments.profile.exists():
        measured = measure_profile(data, serve_arguments=flags)
        arguments.profile.write_text(json.dumps(measured, indent=1) + "\n")
    profile = json.loads(arguments.profile.read_text())
    hardware = from_profile(arguments.profile)
    step_times = hardware.step_time, device_of(profile).step_time

    def run(trace: Trace) -> Outcomes:
        return simulate(make_setup(None, settings, hardware, 1), trace)

    rows = []
    for name in SHAPES:
        real, simulated = Latencies(), {"followed": Latencies(), "profile": Latencies()}
        trace = make_trace(name, hardware, arguments.seconds, arguments.load, arguments.seed)
        report, speed = served(flags, trace, profile["engine"]["block_size"], step_times)
        real.add_real(report)
        simulated["profile"].add_simulated(run(trace))
        simulated["followed"].add_simulated(simulated_at(speed, trace, run))
        rows.append(compare(name, real, simulated))
        print(table(rows[-1:]), flush=True)
        print(
            f"steps took {speed.factor:.2f} of the profile's, in half a second "
            f"{speed.fastest:.2f} to {speed.slowest:.2f}",
            flush=True,
        )
    cells = [row[f"{latency}_{column}"] for row in rows for latency, column in _COLUMNS]
    worst = max(abs(cell["followed_error"]) for cell in cells)
    print(f"\n{table(rows)}\n\nlargest error: {worst:.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
