"""A thousand mixed requests with aborts at random stages, again and again: nothing leaks, nothing is left."""

from __future__ import annotations

import pathlib
import random
import re
import time
from collections.abc import Iterator

import anyio
import httpx
import psutil
import pytest
from httpx_aiohttp import AiohttpTransport

from headrace.testing.live import Numbers, until_idle
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

NUM_REQUESTS = 1000
CONCURRENCY = 48
MAX_GROWTH_BYTES = 8 << 20


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    """A server whose KV pool holds a fraction of what it is asked for: it queues, preempts and reuses."""
    path = tmp_path_factory.mktemp("script") / "soak.json"
    write_script(path, [f" word{number}" for number in range(40)], eos=False)
    engine = {"kv_memory": "128KiB", "max_model_len": 256, "max_num_sequences": 16}
    arguments = ["--model", f"scripted:{path}", "--set", "models.0.name=soak"]
    for key, value in engine.items():
        arguments += ["--set", f"models.0.engine.{key}={value}"]
    arguments += ["--set", "models.0.engine.max_queued_requests=2000"]
    with started_server([*arguments, "--set", "logging.level=warning"]) as server:
        yield server


def make_body(rng: random.Random) -> dict[str, object]:
    prefix = f"conversation {rng.randrange(16)} " * 4
    body: dict[str, object] = {
        "prompt": prefix + "x" * rng.randrange(1, 40),
        "max_tokens": rng.randrange(1, 24),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "stream": rng.random() < 0.5,
        "temperature": rng.choice((0, 0.7, 1.0)),
    }
    extra = rng.choice(("none", "logprobs", "stop", "penalty", "echo", "min_p"))
    if extra == "logprobs":
        body["logprobs"] = rng.randrange(0, 5)
    elif extra == "stop":
        body["stop"] = [f"word{rng.randrange(40)}"]
    elif extra == "penalty":
        body["frequency_penalty"] = 0.5
    elif extra == "echo":
        body |= {"echo": True, "logprobs": 1}
    elif extra == "min_p":
        body["min_p"] = 0.1
    return body


async def send(client: httpx.AsyncClient, url: str, rng: random.Random) -> str:
    """Send one request; 30 % leave: before the answer, at its headers, or after some of its lines."""
    body = make_body(rng)
    stage = rng.choice(("early", "headers", "middle")) if rng.random() < 0.3 else "stay"
    with anyio.move_on_after(rng.random() * 0.05 if stage == "early" else 120) as scope:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if stage == "headers":
                return "left"
            left = 3 if stage == "middle" else 10**9
            async for line in response.aiter_lines():
                assert '"error"' not in line, line
                left -= 1
                if left == 0:
                    return "left"
            assert response.status_code == 200
    return "left" if scope.cancelled_caught else "done"


async def one_round(url: str, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    seeds = iter([rng.random() for _ in range(NUM_REQUESTS)])
    counts = {"left": 0, "done": 0}

    async def worker(client: httpx.AsyncClient) -> None:
        for own in seeds:
            counts[await send(client, url, random.Random(own))] += 1

    async with httpx.AsyncClient(transport=AiohttpTransport(), timeout=120) as client:
        async with anyio.create_task_group() as group:
            for _ in range(CONCURRENCY):
                group.start_soon(worker, client)
    return counts


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    found = re.search(rf"^headrace_{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    assert found is not None, f"no headrace_{name} in:\n{text}"
    return float(found.group(1))


def settle(url: str) -> None:
    """Wait until nothing runs, nothing waits and every block is free."""
    for _ in range(200):
        busy = gauge(url, "requests_running") + gauge(url, "requests_waiting")
        if busy == 0 and gauge(url, "kv_blocks_free") == gauge(url, "kv_blocks"):
            return
        time.sleep(0.05)
    raise AssertionError(httpx.get(f"{url}/metrics").text)


def anonymous_bytes(server: StartedServer) -> dict[str, int]:
    """RssAnon of the gateway and of its engine."""
    gateway = psutil.Process(server.process.pid)
    sizes = {}
    for name, process in (("gateway", gateway), ("engine", gateway.children()[0])):
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        sizes[name] = int(status.split("RssAnon:")[1].split()[0]) << 10
    return sizes


def test_times_and_hits_of_preempted_requests(small_server: StartedServer) -> None:
    """M03, M05: one sample of each time per request, whatever its n, chunks and preemptions; what is
    computed again after a preemption is no cache hit.
    """
    url = small_server.url
    names = (
        *("time_to_first_token_seconds_count", "queue_seconds_count", "prefill_seconds_count"),
        *("decode_seconds_count", "prefix_query_tokens_total", "prefix_hit_tokens_total"),
        "preemptions_total",
    )
    before = Numbers(url)

    async def send_all() -> None:
        async with httpx.AsyncClient(transport=AiohttpTransport(), timeout=120) as client:

            async def send_one(number: int) -> None:
                prompt = f"{number:03}" + " unlike any other" * 6  # some are cut into chunks
                body = {"prompt": prompt, "n": 2, "max_tokens": 80}
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 160
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

            async with anyio.create_task_group() as group:
                for number in range(100):
                    group.start_soon(send_one, number)

    anyio.run(send_all)
    after = until_idle(url)
    counts = {name: after.value(name) - before.value(name) for name in names}
    assert counts.pop("preemptions_total") > 0
    assert counts == {
        **dict.fromkeys(names[:4], 100),
        "prefix_query_tokens_total": 100 * len("000" + " unlike any other" * 6),
        "prefix_hit_tokens_total": 0,
    }
    assert after.value("inter_token_seconds_count") > before.value("inter_token_seconds_count")


def test_nothing_is_left_behind(small_server: StartedServer) -> None:
    url = small_server.url
    baseline: dict[str, int] = {}
    for number in range(1, 6):
        counts = anyio.run(one_round, url, 7)
        assert counts["left"] + counts["done"] == NUM_REQUESTS
        assert counts["left"] > NUM_REQUESTS * 0.15
        settle(url)
        time.sleep(1.0)  # at rest, the engine gives free memory back
        sizes = anonymous_bytes(small_server)
        if number == 2:
            baseline = sizes
        for name, size in sizes.items() if number > 2 else ():
            grown = size - baseline[name]
            assert grown <= MAX_GROWTH_BYTES, f"round {number}: the {name} grew by {grown:,} bytes"
    assert gauge(url, "preemptions_total") > 0
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == " word0 word1 word2"
