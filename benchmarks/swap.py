"""Swap the scheduling policy of a server while it streams: what fails, and how long tokens pause.

python benchmarks/swap.py --simulated
python benchmarks/swap.py --source smollm2 --streams 8 --tokens 40

Stretches with swaps and without take turns on the same streams, so that both see the same machine. A gap
is the time between two events of one stream; what a swap pauses shows in the longest ones. There are
twice as many streams as slots, so that the policies have somebody to choose from.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from headrace.load import percentile
from headrace.testing.server import started_server

ADMIN_KEY = "only-for-this-benchmark"
VARIABLE = "HEADRACE_BENCHMARK_ADMIN_KEY"
WINDOW_SECONDS = 0.3
"""From one swap to the next, and how long the longest gap is looked for, with a swap and without."""


@dataclass(slots=True)
class Stretch:
    """What was seen in stretches of one kind."""

    gaps: list[float] = field(default_factory=list)
    swaps: list[float] = field(default_factory=list)
    """Seconds from asking for a swap until every replica used the policy."""
    longest_in_window: list[float] = field(default_factory=list)
    """Seconds, per window: the longest gap that ended in it. A window begins with a swap, if any."""
    errors: list[str] = field(default_factory=list)
    num_answers: int = 0


class Load:
    """Streams without end, whose gaps are counted towards the stretch that is on."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._tokens = tokens
        self.stretch = Stretch()
        self.is_over = False
        self.longest = 0.0

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        for turn in itertools.count():
            if self.is_over:
                return
            try:
                await self._stream(session, f"{number} {turn} said")
            except (aiohttp.ClientError, RuntimeError) as error:
                self.stretch.errors.append(f"{type(error).__name__}: {error}")
            else:
                self.stretch.num_answers += 1

    async def _stream(self, session: aiohttp.ClientSession, prompt: str) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
        }
        last, num_events, end = 0.0, 0, b""
        async with session.post(self._url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                end = line.strip()
                if end.startswith(b'data: {"error"'):
                    raise RuntimeError(end.decode())
                now = time.perf_counter()
                if last:
                    self.stretch.gaps.append(now - last)
                    self.longest = max(self.longest, now - last)
                last, num_events = now, num_events + 1
        if end != b"data: [DONE]" or num_events < 3:
            raise RuntimeError(f"a stream broke off after {num_events} events: {end!r}")


async def swap(session: aiohttp.ClientSession, url: str, use: str, load: Load) -> None:
    """Swap a policy in and note how long it took, and the longest gap beside it."""
    load.longest = 0.0
    start = time.perf_counter()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    address = f"{url}/admin/policies/scheduling"
    async with session.post(address, json={"use": use}, headers=headers) as response:
        if response.status != 200:
            load.stretch.errors.append(f"swap to {use}: {await response.text()}")
            return
    seconds = time.perf_counter() - start
    load.stretch.swaps.append(seconds)
    await asyncio.sleep(max(0.0, WINDOW_SECONDS - seconds))
    load.stretch.longest_in_window.append(load.longest)


async def watch(load: Load) -> None:
    """Note the longest gap of a window without a swap."""
    load.longest = 0.0
    await asyncio.sleep(WINDOW_SECONDS)
    load.stretch.longest_in_window.append(load.longest)


async def measure(url: str, arguments: argparse.Namespace) -> tuple[Stretch, Stretch]:
    """Return what was seen without swaps and with them."""
    without, with_swaps = Stretch(), Stretch()
    load = Load(url, arguments.tokens)
    uses = itertools.cycle(arguments.policies.split(","))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = [
            asyncio.create_task(load.client(session, number)) for number in range(arguments.streams)
        ]
        await asyncio.sleep(1.0)
        for stretch in (without, with_swaps) * arguments.rounds:
            load.stretch = stretch
            end = time.perf_counter() + arguments.seconds
            while time.perf_counter() < end:
                if stretch is with_swaps:
                    await swap(session, url, next(uses), load)
                else:
                    await watch(load)
        load.is_over = True
        await asyncio.gather(*clients)
    return without, with_swaps


def row(name: str, stretch: Stretch) -> str:
    def shown(values: Sequence[float], share: float) -> str:
        return f"{percentile(sorted(values), share) * 1000:.1f}" if values else "–"

    cells = [
        name,
        f"{len(stretch.swaps)}",
        f"{stretch.num_answers}",
        f"{len(stretch.errors)}",
        f"{len(stretch.gaps)}",
        *[shown(stretch.gaps, share) for share in (0.5, 0.99, 0.999, 1.0)],
        shown(stretch.longest_in_window, 0.5),
        shown(stretch.swaps, 0.5),
        shown(stretch.swaps, 1.0),
    ]
    return "| " + " | ".join(cells) + " |"


def config_text(arguments: argparse.Namespace) -> str:
    """Return the configuration: half as many slots as streams, over all replicas."""
    backend: object = "cpu"
    if arguments.simulated:
        backend = {"use": "simulated", "options": {"base_seconds": 0.01}}
    engine = {
        "num_threads": 1,
        "kv_memory": "128MiB",
        "max_model_len": 512,
        "max_num_sequences": max(1, arguments.streams // (2 * arguments.replicas)),
    }
    model = {
        "name": "m",
        "source": arguments.source,
        "replicas": arguments.replicas,
        "backend": backend,
        "engine": engine,
    }
    return json.dumps({"gateway": {"admin": {"key_env": VARIABLE}}, "models": [model]})


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100, help="per answer")
    parser.add_argument("--rounds", type=int, default=10, help="of a stretch without and one with")
    parser.add_argument("--seconds", type=float, default=2.0, help="per stretch")
    parser.add_argument(
        "--policies",
        default="priority,shortest_first,fair_share,slo",
        help="names or files, in turn",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="pretended devices: real processes, steps of 10 ms"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "headrace.yaml"
        path.write_text(config_text(arguments))
        environment = {VARIABLE: ADMIN_KEY}
        with started_server(["--config", str(path)], environment=environment) as server:
            without, with_swaps = asyncio.run(measure(server.url, arguments))
    print(
        f"{arguments.streams} streams on {arguments.replicas} replicas; milliseconds\n\n"
        "| | swaps | answers | errors | gaps | gap p50 | p99 | p99.9 | longest "
        f"| longest in {WINDOW_SECONDS * 1000:.0f} ms, p50 | a swap takes p50 | longest |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    print(row("without", without))
    print(row("with swaps", with_swaps))
    for error in (without.errors + with_swaps.errors)[:5]:
        print(error)
    if without.errors or with_swaps.errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
