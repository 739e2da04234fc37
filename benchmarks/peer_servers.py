"""The servers that benchmarks/peers.py compares: how each is started, loaded and stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import anyio

from headrace.load import Lengths, LoadPlan, run_load
from headrace.load.overheads import core_seconds

START_SECONDS = 600.0
NAME = "peer"
"""What every server is told to call the model."""


class PeerFailed(Exception):
    """A peer did not start, or did not answer as it was asked; the text says how."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One load on one peer: medians over its requests in seconds, its rate, and its cost."""

    ttft: float
    tpot: float
    tokens_per_second: float
    core_seconds: float = 0.0
    """Core time that the peer's processes took per request."""


class Loaded(Protocol):
    """A peer that is up."""

    def load(
        self, prompts: Sequence[Sequence[int]], concurrency: int, output_tokens: int
    ) -> Figures:
        """Keep `concurrency` of the prompts in flight until all are done. PeerFailed where one fails."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server, and which path answers 200 once it is ready."""

    name: str
    words: Sequence[str]
    ready_path: str
    environment: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def headrace_command(model: Path, settings: Sequence[str], cache: Path | None = None) -> Command:
    """Return the start of `headrace serve`; with `cache`, that folder holds its compiled kernels."""
    words = [sys.executable, "-m", "headrace", "serve", "--model", str(model)]
    for setting in (f"models.0.name={NAME}", *settings):
        words += ["--set", setting]
    environment = {} if cache is None else {"HEADRACE_CACHE": str(cache)}
    return Command("headrace", words, "/ready", environment)


def vllm_command(folder: Path, checkpoint: Path) -> Command:
    words = [f"{folder}/bin/vllm", "serve", str(checkpoint), "--served-model-name", NAME]
    words += ["--dtype", "bfloat16", "--max-model-len", "4096", "--host", "127.0.0.1"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return Command("vllm", words, "/health", environment)


def llama_command(folder: Path, model: Path) -> Command:
    words = [f"{folder}/bin/llama-server", "-m", str(model), "-t", "2", "-tb", "2"]
    words += ["-c", "32768", "-np", "16", "--no-webui", "--host", "127.0.0.1"]
    return Command("llama-server", words, "/health")


@dataclass(slots=True)
class Server:
    """A server that is up, on a port of its own."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    ready_seconds: float
    log: Path

    def load(
        self, prompts: Sequence[Sequence[int]], concurrency: int, output_tokens: int
    ) -> Figures:
        plan = LoadPlan(
            url=f"http://127.0.0.1:{self.port}",
            model=NAME,
            concurrency=concurrency,
            num_requests=len(prompts),
            prompt_ids=prompts,
            output_tokens=Lengths.fixed(output_tokens),
        )
        before = tree_seconds(self.process.pid)
        report = anyio.run(run_load, plan)
        spent = tree_seconds(self.process.pid) - before
        if report.errors:
            raise PeerFailed(f"{len(report.errors)} requests failed: {report.errors[0]}")
        for prompt, outcome in zip(prompts, report.outcomes, strict=True):
            if (outcome.prompt_tokens, outcome.output_tokens) != (len(prompt), output_tokens):
                raise PeerFailed(
                    f"asked for {len(prompt)} prompt and {output_tokens} output tokens, "
                    f"got {outcome.prompt_tokens} and {outcome.output_tokens}"
                )
            if outcome.cached_tokens:
                raise PeerFailed(f"{outcome.cached_tokens} tokens of a prompt were cached")
        return Figures(
            report.percentile("ttft", 0.5) or 0.0,
            report.percentile("tpot", 0.5) or 0.0,
            report.output_tokens_per_second,
            spent / len(prompts),
        )

    def engine_pid(self) -> int:
        """Return the process that holds the model: of this one and its children, the largest."""
        pids = [self.process.pid, *children(self.process.pid)]
        return max(pids, key=anonymous_bytes)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started, and theirs."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            for child in (thread / "children").read_text().split():
                found += [int(child), *children(int(child))]
    return found


def tree_seconds(pid: int) -> float:
    """Return the core time that a process and those it started have taken, in seconds."""
    return sum(core_seconds(member) or 0.0 for member in (pid, *children(pid)))


def anonymous_bytes(pid: int) -> int:
    """Return RssAnon of a process: memory of its own, no file's pages."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def started(command: Command) -> Iterator[Server]:
    """Start a server, yield it when it is ready, end it. PeerFailed with its last words otherwise."""
    port = free_port()
    log = Path(tempfile.mkdtemp(prefix=f"peer-{command.name}-")) / "log"
    start = time.perf_counter()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                [*command.words, "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **command.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise PeerFailed(f"{command.name} cannot be started: {error}") from error
    try:
        while not is_ready(port, command.ready_path):
            if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise PeerFailed(f"{command.name} did not start: {''.join(last)[:300]} ({log})")
            # asked every hundredth of a second, a start that takes half a minute of both cores lost seconds
            time.sleep(max(0.01, 0.01 * (time.perf_counter() - start)))
        yield Server(command.name, port, process, time.perf_counter() - start, log)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it started."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue


class OpenVino:
    """OpenVINO GenAI in its own environment, behind benchmarks/openvino_worker.py."""

    def __init__(self, process: subprocess.Popen[bytes], ready_seconds: float) -> None:
        self._process = process
        self.ready_seconds = ready_seconds

    def load(
        self, prompts: Sequence[Sequence[int]], concurrency: int, output_tokens: int
    ) -> Figures:
        job = {"concurrency": concurrency, "output_tokens": output_tokens, "prompts": prompts}
        assert self._process.stdin is not None and self._process.stdout is not None
        before = tree_seconds(self._process.pid)
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"OpenVINO's worker ended with exit code {self._process.wait()}")
        spent = tree_seconds(self._process.pid) - before
        answer = json.loads(line)
        requests = answer["requests"]
        if any(request["tokens"] != output_tokens for request in requests):
            raise PeerFailed(f"OpenVINO gave other than {output_tokens} tokens")
        tpots = [(r["e2e"] - r["ttft"]) / max(1, r["tokens"] - 1) for r in requests]
        rate = sum(request["tokens"] for request in requests) / answer["wall"]
        ttft = median(request["ttft"] for request in requests)
        return Figures(ttft, median(tpots), rate, spent / len(prompts))


@contextmanager
def started_openvino(folder: Path, model: Path) -> Iterator[OpenVino]:
    """Start the worker, yield it when it has loaded the model, end it."""
    worker = Path(__file__).with_name("openvino_worker.py")
    log = Path(tempfile.mkdtemp(prefix="peer-openvino-")) / "log"
    start = time.perf_counter()
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(
                [f"{folder}/bin/python", str(worker), str(model), "4"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerFailed(f"OpenVINO cannot be started: {error}") from error
    try:
        assert process.stdout is not None
        if b"ready" not in process.stdout.readline():
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise PeerFailed(f"OpenVINO does not read {model.name}: {''.join(last)[:300]}")
        yield OpenVino(process, time.perf_counter() - start)
    finally:
        end(process)


def llama_bench_tpots(
    folder: Path, model: Path, depth: int, tokens: int, rounds: int
) -> list[float]:
    """Return llama-bench's seconds per token, by round: `tokens` decoded behind a context of `depth`."""
    words = [f"{folder}/bin/llama-bench", "-m", str(model), "-t", "2", "-p", "0", "-o", "json"]
    words += ["-n", str(tokens), "-d", str(depth), "-r", str(rounds)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"llama-bench: {error}") from error
    if done.returncode:
        raise PeerFailed(f"llama-bench: {done.stderr.strip()[-300:]}")
    return [nanoseconds / 1e9 / tokens for nanoseconds in json.loads(done.stdout)[0]["samples_ns"]]
