"""Headrace beside vLLM's CPU build and llama.cpp's server: one model, one machine, one run, in turn.

    python benchmarks/peers.py --models DIR [--vllm VENV] [--llama FOLDER] [--concurrency 1 4 16]

DIR holds `smollm2.gguf` and, for vLLM, the plain checkpoint `smollm2-hf`. VENV is a virtual environment
with vLLM for CPU, FOLDER one with llama.cpp's `bin/llama-server`. Peers not given are left out. Each
server is started, warmed up by one request, measured and stopped before the next one starts; the load is
greedy streamed completions of 120 prompt and 96 output tokens. Quote the ratios: absolute figures are the
machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import httpx

from headrace.load import LoadPlan, LoadReport, run_load


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to measure: how to start it, which path says it is ready, what it calls the model."""

    name: str
    command: list[str]
    ready_path: str
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peers(arguments: argparse.Namespace) -> Iterator[tuple[Peer, int]]:
    models = pathlib.Path(arguments.models)
    port = free_port()
    headrace = [sys.executable, "-m", "headrace", "serve", "--port", str(port)]
    headrace += ["--model", str(models / "smollm2.gguf"), "--set", "models.0.name=smol"]
    yield Peer("headrace", headrace + arguments.set, "/ready", "smol"), port
    if arguments.vllm:
        port = free_port()
        command = [f"{arguments.vllm}/bin/vllm", "serve", str(models / "smollm2-hf")]
        command += ["--port", str(port), "--served-model-name", "smol", "--dtype", "bfloat16"]
        command += ["--max-model-len", "4096", "--host", "127.0.0.1"]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        yield Peer("vllm-cpu", command, "/health", "smol", environment), port
    if arguments.llama:
        port = free_port()
        command = [f"{arguments.llama}/bin/llama-server", "-m", str(models / "smollm2.gguf")]
        command += ["-t", "2", "-tb", "2", "--port", str(port), "-c", "32768", "-np", "16"]
        command += ["--no-webui", "--host", "127.0.0.1"]
        yield Peer("llama-server", command, "/health", "smol"), port


@contextmanager
def running(peer: Peer, port: int) -> Iterator[tuple[str, float]]:
    """Start a peer, yield its address and the seconds from start to ready, stop it."""
    url = f"http://127.0.0.1:{port}"
    log = open(f"peer-{peer.name}.log", "w")
    start = time.perf_counter()
    process = subprocess.Popen(
        peer.command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **peer.environment},
        start_new_session=True,
    )
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - start > 300:
                raise SystemExit(f"{peer.name} did not start: see peer-{peer.name}.log")
            try:
                if httpx.get(url + peer.ready_path, timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield url, time.perf_counter() - start
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def measure(url: str, model: str, concurrency: int, rounds: int) -> LoadReport:
    """Return the run of median throughput out of `rounds`, after one warm-up request."""
    warm_up = LoadPlan(url=url, model=model, num_requests=1, output_tokens=8, seed=99)
    anyio.run(run_load, warm_up)
    runs = []
    for seed in range(rounds):
        plan = LoadPlan(
            url=url,
            model=model,
            concurrency=concurrency,
            num_requests=max(4, 2 * concurrency),
            seed=1000 * concurrency + seed,
        )
        runs.append(anyio.run(run_load, plan))
    runs.sort(key=lambda run: run.output_tokens_per_second)
    return runs[len(runs) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", required=True)
    parser.add_argument("--vllm")
    parser.add_argument("--llama")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="passed on to headrace serve")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    arguments.set = [word for setting in arguments.set for word in ("--set", setting)]
    rows = []
    print(
        f"{'server':14}{'clients':>8}{'tok/s':>9}{'TTFT p50':>10}{'TPOT p50':>10}{'ready s':>9}  errors"
    )
    for peer, port in peers(arguments):
        with running(peer, port) as (url, ready_seconds):
            for concurrency in arguments.concurrency:
                report = measure(url, peer.model, concurrency, arguments.rounds)
                ttft = 1e3 * (report.percentile("ttft_seconds", 0.5) or 0)
                tpot = 1e3 * (report.percentile("tpot_seconds", 0.5) or 0)
                rate = report.output_tokens_per_second
                print(
                    f"{peer.name:14}{concurrency:8}{rate:9.1f}{ttft:10.1f}{tpot:10.2f}"
                    f"{ready_seconds:9.1f}  {len(report.errors)}",
                    flush=True,
                )
                rows.append(
                    {"server": peer.name, "ready_seconds": ready_seconds, **report.as_dict()}
                )
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
