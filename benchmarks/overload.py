"""What a refusal costs while ten times the capacity arrives, and what those inside notice of it.

    python benchmarks/overload.py [--source smollm2] [--times 10] [--seconds 20]

A simulated engine serves so many requests a second; that rate is measured, with as many clients as it has
places. Then requests come at `times` that rate, with Poisson arrivals and whoever still waits: once in front
of `kv_footprint` with a short queue (503), once in front of `token_bucket` (429). A refusal's time is taken by
the client, connection and event loop of a Python client included, and by the gateway: arrival to the end of
the request in its own log line. The core time of one is what the gateway process took beyond the served
requests. Target: under 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from headrace.load import percentile
from headrace.testing.server import StartedServer, started_server

PLACES = 16
PROMPT = [1000 + token for token in range(48)]
OUTPUT_TOKENS = 16
BLOCKS_PER_REQUEST = 4
STEP_SECONDS = 0.02
MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    seconds: float
    """Until the first event of a stream, or until a refusal was read."""


class Client:
    """Asks for short streams and notes what became of them."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url + "/v1/completions"
        self._random = random.Random(seed)
        self.answers: list[Answer] = []

    async def ask(self, session: aiohttp.ClientSession) -> None:
        prompt = [self._random.randrange(1000, 40_000), *PROMPT[1:]]
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        start = time.perf_counter()
        async with session.post(self._url, json=body) as response:
            if response.status == 200:
                await response.content.readline()
                seconds = time.perf_counter() - start
                await response.read()
            else:
                await response.read()
                seconds = time.perf_counter() - start
        self.answers.append(Answer(response.status, seconds))

    async def closed(self, seconds: float) -> float:
        """Return the requests per second of as many clients as the engine has places."""
        start = time.perf_counter()

        async def client(session: aiohttp.ClientSession) -> None:
            while time.perf_counter() - start < seconds:
                await self.ask(session)

        async with session_of() as session, asyncio.TaskGroup() as group:
            for _ in range(PLACES):
                group.create_task(client(session))
        return len(self.answers) / (time.perf_counter() - start)

    async def open(self, seconds: float, rate: float) -> None:
        """Send at a rate. Who is late because this process was, sends at once."""
        due = start = time.perf_counter()
        async with session_of() as session, asyncio.TaskGroup() as group:
            while due - start < seconds:
                group.create_task(self.ask(session))
                due += self._random.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))


def session_of() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def config_text(admission: Sequence[dict[str, Any]], source: str, block_bytes: int) -> str:
    """Return a configuration whose pool has blocks for as many requests as there are places."""
    num_blocks = max(PLACES * BLOCKS_PER_REQUEST, MODEL_LEN // 16)
    backend = {
        "base_seconds": STEP_SECONDS,
        "seconds_per_prefill_token": 0,
        "seconds_per_sequence": 0,
        "seconds_per_kv_row": 0,
    }
    return json.dumps(
        {
            "logging": {"format": "json"},
            "models": [
                {
                    "name": "m",
                    "source": source,
                    "backend": {"use": "simulated", "options": backend},
                    "engine": {
                        "kv_memory": num_blocks * block_bytes,
                        "max_model_len": MODEL_LEN,
                        "max_num_sequences": PLACES,
                        "prefix_caching": False,
                    },
                }
            ],
            "admission": admission,
        }
    )


def core_seconds(server: StartedServer) -> float:
    """Return the core time that the gateway process has taken so far, its engines apart."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def refused_seconds(lines: Sequence[str]) -> list[float]:
    """Return how long the gateway says that each refused request took."""
    seconds = []
    for line in lines:
        if '"request finished"' in line:
            fields = json.loads(line)
            if fields["status"] in (429, 503):
                seconds.append(float(fields["duration_seconds"]))
    return seconds


def show(title: str, seconds: Sequence[float]) -> None:
    waits = sorted(seconds)
    shown = "  ".join(
        f"p{share} {percentile(waits, share / 100) * 1000:8.2f}" for share in (50, 90, 99)
    )
    print(f"    {title:34} {shown} ms  of {len(waits)}", flush=True)


def measure(title: str, admission: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Measure the capacity without a limit reached, then the overload, on one server."""
    print(title)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "headrace.yaml"
        path.write_text(config_text(admission, options.source, options.block_bytes))
        with started_server(["--config", str(path)]) as server:
            fair = Client(server.url, 1)
            before = core_seconds(server)
            capacity = asyncio.run(fair.closed(options.seconds / 2))
            each_served = (core_seconds(server) - before) / len(fair.answers)
            print(f"    capacity {capacity:.1f} requests/s, {each_served * 1000:.2f} core ms each")
            show("TTFT at capacity", [each.seconds for each in fair.answers if each.status == 200])
            asyncio.run(asyncio.sleep(1.0))
            num_lines, before = len(server.output), core_seconds(server)
            crowd = Client(server.url, 2)
            asyncio.run(crowd.open(options.seconds, options.times * capacity))
            spent = core_seconds(server) - before
            time.sleep(1.0)
            lines = server.output[num_lines:]
    served = [each.seconds for each in crowd.answers if each.status == 200]
    refused = [each.seconds for each in crowd.answers if each.status in (429, 503)]
    print(
        f"    {len(crowd.answers) / options.seconds:.0f} requests/s: {len(served)} served, "
        f"{len(refused)} refused, {len(crowd.answers) - len(served) - len(refused)} failed"
    )
    show(f"TTFT at {options.times:g} times", served)
    show("refusal, client", refused)
    show("refusal, gateway", refused_seconds(lines))
    each_refused = max(0.0, spent - len(served) * each_served) / max(1, len(refused))
    print(f"    core time of a refusal: {each_refused * 1000:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", default="smollm2", help="whose tokenizer the server has")
    parser.add_argument("--times", type=float, default=10.0, help="the capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="of overload")
    parser.add_argument(
        "--block-bytes", type=int, default=368_640, help="KV bytes of one block (SmolLM2: bfloat16)"
    )
    options = parser.parse_args()
    queue = {"max_queued_requests": PLACES, "max_wait": "30s"}
    most = PLACES / (OUTPUT_TOKENS * STEP_SECONDS)
    bucket = {"requests_per_minute": int(60 * most), "requests_burst": PLACES, "by": "server"}
    measure("503: kv_footprint", [{"use": "kv_footprint", "options": queue}], options)
    measure("429: token_bucket", [{"use": "token_bucket", "options": bucket}], options)


if __name__ == "__main__":
    main()
