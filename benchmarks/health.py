"""Time GET /health while long prompts are tokenized and many streams run, and weigh the idle gateway.

python benchmarks/health.py [--model smollm2] [--streams 500] [--prompts 8] [--megabytes 2] [--rounds 3]

The engine is simulated (its steps take time and no CPU), so what can hold /health up is the gateway alone. The
streams are read by one process and the prompts sent by another; all of them share this machine's CPUs with the
server. Targets: p99 at most 200 ms, better 50 ms; memory at most 150 MB, better 80 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.synchronize
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from headrace.load import percentile
from headrace.testing.server import StartedServer, started_server

POLL_SECONDS = 0.02
WORDS = "the wheel turns and the water runs through the mill race over stones "


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Place:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        return cls(parts.hostname, parts.port)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = {
        "models.0.backend": "simulated",
        "models.0.engine.max_num_sequences": arguments.streams,
        "models.0.engine.max_batched_tokens": 2048,
        "models.0.engine.max_queued_requests": arguments.streams,
    }
    flags = ["--model", arguments.model]
    for key, value in settings.items():
        flags += ["--set", f"{key}={value}"]
    with started_server(flags) as server:
        print(f"idle memory of the gateway process: {idle_megabytes(server):.0f} MB")
        place = Place.of(server.url)
        report("idle", poll(place, 2.0))
        for number in range(arguments.rounds):
            with Streams(place, arguments.streams):
                report(f"round {number + 1}, {arguments.streams} streams", poll(place, 3.0))
                waits = poll_beside_prompts(place, arguments.prompts, arguments.megabytes)
                report(f"round {number + 1}, and {arguments.prompts} prompts", waits)


def idle_megabytes(server: StartedServer) -> float:
    """Return the resident memory of the gateway, its engines apart."""
    time.sleep(1.0)
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def poll(place: Place, seconds: float, done: threading.Event | None = None) -> list[float]:
    """Ask for /health again and again; return the milliseconds each answer took."""
    connection = HTTPConnection(place.host, place.port, timeout=60)
    waits = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (done is not None and done.is_set()):
        start = time.monotonic()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        waits.append((time.monotonic() - start) * 1000)
        time.sleep(POLL_SECONDS)
    connection.close()
    return waits


def report(name: str, waits: list[float]) -> None:
    waits = sorted(waits)
    shown = "  ".join(f"p{share} {percentile(waits, share / 100):7.1f}" for share in (50, 90, 99))
    print(f"{name:<28} {shown}  max {max(waits):7.1f} ms of {len(waits)}", flush=True)


class Streams:
    """Streams that run until the block is left, read by a process of their own."""

    def __init__(self, place: Place, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._running = context.Event()
        self._process = context.Process(target=read_streams, args=(place, count, self._running))

    def __enter__(self) -> None:
        self._process.start()
        if not self._running.wait(60):
            raise SystemExit("the streams did not start within 60 s")

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.join()


def read_streams(place: Place, count: int, running: multiprocessing.synchronize.Event) -> None:
    async def read_one(started: asyncio.Semaphore) -> None:
        body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(place.host, place.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        status = await reader.readline()
        assert b" 200 " in status, status
        started.release()
        while await reader.read(1 << 16):
            pass

    async def read_all() -> None:
        started = asyncio.Semaphore(0)
        readers = [asyncio.create_task(read_one(started)) for _ in range(count)]
        for _ in range(count):
            await started.acquire()
        running.set()
        await asyncio.gather(*readers)

    asyncio.run(read_all())


def poll_beside_prompts(place: Place, count: int, megabytes: float) -> list[float]:
    """Poll while `count` prompts of that size are sent at once, until the last one is answered."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=send_prompts, args=(place, count, megabytes))
    done = threading.Event()
    process.start()
    threading.Thread(target=lambda: (process.join(), done.set()), daemon=True).start()
    return poll(place, 120.0, done)


def send_prompts(place: Place, count: int, megabytes: float) -> None:
    text = WORDS * int(megabytes * 1e6 / len(WORDS))
    bodies = [
        ("/v1/completions", json.dumps({"prompt": text, "max_tokens": 1})),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": text}]})),
    ]

    def send(number: int) -> None:
        path, body = bodies[number % len(bodies)]
        connection = HTTPConnection(place.host, place.port, timeout=120)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 400, answer.status  # it is tokenized, and does not fit
        connection.close()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
