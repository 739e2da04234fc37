"""Routing by prefix against routing at random: hit rate and time to first token on real replicas.

    python benchmarks/routing.py [--source smollm2] [--replicas 4] [--tenants 64] [--per-tenant 20]

Every tenant has a prefix of its own; all prefixes together fit only once in the KV of the whole fleet. Each
policy gets a fresh fleet and one warm-up request per tenant. Then `per-tenant` requests of each tenant, in
random order and with Poisson arrivals, at 70 % of the rate that the fleet reaches with random routing and
all clients waiting. The hit rate is measured against one infinite cache, which has every prefix after the
warm-up. Replicas compute with one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from headrace.testing.server import started_server

BLOCK_SIZE = 16
VOCABULARY = range(1000, 40_000)


@dataclass(frozen=True)
class Scale:
    """What is sent: tokens and requests."""

    tenants: int
    per_tenant: int
    prefix_tokens: int
    tail_tokens: int
    output_tokens: int

    @property
    def infinite_hit_tokens(self) -> int:
        """What an infinite cache has of each prompt after the warm-up."""
        return self.prefix_tokens // BLOCK_SIZE * BLOCK_SIZE

    @property
    def prefix_blocks(self) -> int:
        return -(-self.prefix_tokens // BLOCK_SIZE)

    def blocks_per_replica(self, replicas: int) -> int:
        """All prefixes once in the fleet, and a quarter more for what requests add to theirs."""
        return -(-self.tenants // replicas) * self.prefix_blocks * 5 // 4


@dataclass(frozen=True)
class Answer:
    ttft_seconds: float
    cached_tokens: int


class Clients:
    """Sends prompts, as token ids, and reads streams."""

    def __init__(self, url: str, scale: Scale, seed: int) -> None:
        self._url = url + "/v1/completions"
        self._scale = scale
        self._random = random.Random(seed)
        self.prefixes = [self._tokens(scale.prefix_tokens) for _ in range(scale.tenants)]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=count)

    async def ask(self, session: aiohttp.ClientSession, tenant: int) -> Answer:
        body = {
            "prompt": self.prefixes[tenant] + self._tokens(self._scale.tail_tokens),
            "max_tokens": self._scale.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first, cached = None, 0
        async with session.post(self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if first is None and chunk.get("choices"):
                    first = time.perf_counter() - start
                if usage := chunk.get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert first is not None, "an answer without a token"
        return Answer(first, cached)

    async def closed(self, tenants: Sequence[int], clients: int) -> tuple[float, list[Answer]]:
        """Return (seconds, answers) of so many clients who ask again as soon as they have an answer."""
        todo = iter(tenants)
        answers: list[Answer] = []

        async def client(session: aiohttp.ClientSession) -> None:
            for tenant in todo:
                answers.append(await self.ask(session, tenant))  # noqa: PERF401 - one by one

        start = time.perf_counter()
        async with session_of() as session, asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client(session))
        return time.perf_counter() - start, answers

    async def open(self, tenants: Sequence[int], rate: float) -> list[Answer]:
        """Return the answers to requests that come at a rate, whoever still waits."""
        async with session_of() as session, asyncio.TaskGroup() as group:
            tasks = []
            for tenant in tenants:
                tasks.append(group.create_task(self.ask(session, tenant)))
                await asyncio.sleep(self._random.expovariate(rate))
        return [task.result() for task in tasks]


def session_of() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def run_policy(
    url: str, policy: str, scale: Scale, rate: float, arguments: argparse.Namespace
) -> tuple[float, list[Answer]]:
    """Return (the rate it was asked at, answers). Random is measured first, to find its capacity."""
    clients = Clients(url, scale, arguments.seed)
    await clients.closed(range(scale.tenants), arguments.replicas)
    order = [tenant for tenant in range(scale.tenants) for _ in range(scale.per_tenant)]
    random.Random(arguments.seed + 1).shuffle(order)
    if not rate:
        sample = order[: max(4 * arguments.replicas, len(order) // 8)]
        seconds, _ = await clients.closed(sample, 4 * arguments.replicas)
        capacity = len(sample) / seconds
        print(f"capacity with {policy}: {capacity:.2f} requests/s", flush=True)
        rate = 0.7 * capacity
    return rate, await clients.open(order, rate)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def config_text(policy: str, arguments: argparse.Namespace, scale: Scale) -> str:
    backend: object = "cpu"
    if arguments.simulated:
        backend = {"use": "simulated", "options": {"seconds_per_prefill_token": 5e-4}}
    kv_memory = scale.blocks_per_replica(arguments.replicas) * arguments.block_bytes
    return json.dumps(
        {
            "gateway": {"stall_timeout": "10m"},
            "models": [
                {
                    "name": "m",
                    "source": arguments.source,
                    "replicas": arguments.replicas,
                    "backend": backend,
                    "engine": {
                        "num_threads": 1,
                        "kv_memory": kv_memory,
                        "max_model_len": 1024,
                        "max_queued_requests": 10_000,
                        "block_size": BLOCK_SIZE,
                        "activations": arguments.activations,
                    },
                }
            ],
            "routing": {"use": policy},
        }
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--per-tenant", type=int, default=20)
    parser.add_argument("--prefix-tokens", type=int, default=600)
    parser.add_argument("--tail-tokens", type=int, default=20)
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument(
        "--block-bytes", type=int, default=368_640, help="KV bytes of one block (SmolLM2: bfloat16)"
    )
    parser.add_argument("--policies", default="random,prefix_hash", help="the first sets the rate")
    parser.add_argument(
        "--simulated", action="store_true", help="pretended devices: real processes, no arithmetic"
    )
    parser.add_argument("--activations", default="precise", help="int8 takes half the time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    scale = Scale(
        arguments.tenants,
        arguments.per_tenant,
        arguments.prefix_tokens,
        arguments.tail_tokens,
        arguments.output_tokens,
    )
    rate, first_median, first_p90 = 0.0, 0.0, 0.0
    rows = []
    for policy in arguments.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "headrace.yaml"
            path.write_text(config_text(policy, arguments, scale))
            with started_server(["--config", str(path)], timeout_seconds=300) as server:
                rate, answers = asyncio.run(run_policy(server.url, policy, scale, rate, arguments))
        times = [answer.ttft_seconds for answer in answers]
        median, p90 = statistics.median(times), quantile(times, 0.9)
        first_median, first_p90 = first_median or median, first_p90 or p90
        hits = sum(answer.cached_tokens for answer in answers)
        share = hits / (len(answers) * scale.infinite_hit_tokens)
        rows.append(
            f"| {policy} | {share:.1%} | {median * 1000:.0f} | {p90 * 1000:.0f} "
            f"| {median / first_median:.2f} | {p90 / first_p90:.2f} |"
        )
        print(rows[-1], flush=True)
    print(
        f"\n{arguments.replicas} replicas of one thread, {arguments.tenants} prefixes of "
        f"{arguments.prefix_tokens} tokens, {scale.blocks_per_replica(arguments.replicas)} blocks "
        f"each, {rate:.2f} requests/s\n\n"
        "| policy | hits, of one infinite cache | TTFT p50 ms | p90 ms | p50 ratio | p90 ratio |\n"
        "|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
