"""How near the simulator comes to a real server: three traces replayed on both, latencies side by side.

    python benchmarks/fidelity.py --model smollm2 --profile profile.json

Measures the machine's step times first where the profile does not exist yet (a minute or two). The traces
take about --seconds each. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio

from headrace.cli.simulate import make_setup
from headrace.config import load_config, parse_assignments
from headrace.config.schema import replica_config
from headrace.load import LoadPlan, LoadReport, PlannedRequest, ServiceLevel, run_load
from headrace.load.profile import measure_profile
from headrace.simulator.figures import figures
from headrace.simulator.hardware import Hardware, from_profile
from headrace.simulator.prompts import PromptMaker
from headrace.simulator.simulation import simulate
from headrace.simulator.trace import HASH_BLOCK_TOKENS, Trace, TraceRequest, in_order
from headrace.testing.server import started_server

_SHARED_TOKENS = 2 * HASH_BLOCK_TOKENS
_WARM_UP_REQUESTS = 8
_LOWEST_ID, _NUM_IDS = 100, 40_000
_COLUMNS = (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"), ("tpot", "p90"))


def traces(hardware: Hardware, seconds: float, load: float, seed: int) -> Iterator[Trace]:
    """Yield chats, completions of code, and questions behind shared beginnings.

    Each keeps the server busy for about `load` of the time, by the profile's own step times.
    """
    shapes = {
        "chat": ((60, 0.8, 400), (40, 0.7, 160), 0),
        "code": ((400, 0.5, 1200), (10, 0.6, 40), 0),
        "shared": ((60, 0.6, 300), (24, 0.6, 96), 4),
    }
    for name, (prompt, output, num_prefixes) in shapes.items():
        rng = random.Random(f"{name} {seed}")
        requests: list[TraceRequest] = []
        busy = at = 0.0
        while at < seconds:
            own, num_output = _length(rng, *prompt), _length(rng, *output)
            ids: tuple[int, ...] = ()
            if num_prefixes:
                first = 1000 * (1 + rng.randrange(num_prefixes))
                ids = (first, first + 1, 100_000 + len(requests))
            length = own + (_SHARED_TOKENS if num_prefixes else 0)
            requests.append(TraceRequest(at, length, num_output, ids))
            cost = hardware.step_time.seconds(own, 1, length)
            cost += num_output * hardware.step_time.seconds(0, 4, 4 * length) / 4
            busy += cost
            at += rng.expovariate(1 / (cost / load))
        yield in_order(name, requests)


def _length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(2, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def replay(url: str, trace: Trace, block_size: int) -> LoadReport:
    """Send a trace to a server, prompts as token ids, after a few requests that warm it up."""
    maker = PromptMaker(block_size, "")
    planned = []
    for request in trace.requests:
        tokens, _ = maker.make(request)
        ids = [_LOWEST_ID + token % _NUM_IDS for token in tokens]
        planned.append(PlannedRequest(ids, request.num_output_tokens, request.at))
    warm = [PlannedRequest([7] * (20 + n), 8) for n in range(_WARM_UP_REQUESTS)]

    async def run() -> LoadReport:
        await run_load(LoadPlan(url=url, num_requests=len(warm)), requests=warm)
        plan = LoadPlan(url=url, request_rate=1.0, num_requests=len(planned))
        return await run_load(plan, requests=planned)

    return anyio.run(run)


def compare(name: str, real: LoadReport, simulated: dict[str, Any]) -> dict[str, Any]:
    """Return the latencies of both, in seconds, and how far the simulated ones are off."""
    row: dict[str, Any] = {"trace": name, "requests": len(real.outcomes)}
    for latency, column in _COLUMNS:
        found = real.latency(latency)
        assert found is not None, f"{name}: no request succeeded: {real.errors[:1]}"
        said = simulated["latency_seconds"][latency][column]
        row[f"{latency}_{column}"] = {
            "real": found[column],
            "simulated": said,
            "error": said / found[column] - 1,
        }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "| trace | requests | figure | server | simulator | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for latency, column in _COLUMNS:
            cell = row[f"{latency}_{column}"]
            lines.append(
                f"| {row['trace']} | {row['requests']} | {latency.upper()} {column} | "
                f"{1e3 * cell['real']:.1f} ms | {1e3 * cell['simulated']:.1f} ms | {cell['error']:+.1%} |"
            )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", type=Path, default=Path("profile.json"))
    parser.add_argument("--seconds", type=float, default=45.0, help="length of each trace")
    parser.add_argument("--load", type=float, default=0.5, help="share of the time it is busy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="any key, as for serve")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    settings = [f"models.0.source={arguments.model}", *arguments.set]
    flags = [word for setting in settings for word in ("--set", setting)]
    if not arguments.profile.exists():
        config = load_config(None, flags=parse_assignments(settings)).config
        profile = measure_profile(replica_config(config, 0), serve_arguments=flags)
        arguments.profile.write_text(json.dumps(profile, indent=1) + "\n")
    hardware = from_profile(arguments.profile)
    setup = make_setup(None, settings, hardware, 1)
    rows = []
    for trace in traces(hardware, arguments.seconds, arguments.load, arguments.seed):
        with started_server(flags) as server:
            real = replay(server.url, trace, setup.settings.block_size)
        level = ServiceLevel()
        rows.append(compare(trace.name, real, figures(simulate(setup, trace), trace.name, level)))
        print(table(rows[-1:]), flush=True)
    worst = max(abs(row[f"{a}_{b}"]["error"]) for row in rows for a, b in _COLUMNS)
    print(f"\n{table(rows)}\n\nlargest error: {worst:.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
