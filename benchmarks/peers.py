"""Headrace beside llama.cpp, OpenVINO GenAI and vLLM: same file, same machine, one run, one after the other.

    python benchmarks/peers.py --models DIR [--llama FOLDER] [--openvino VENV] [--vllm VENV] [--rows a,b]

DIR holds smollm2.gguf, gemma3-270m.gguf and their plain checkpoints smollm2-hf and gemma3-hf. Each peer is
started, warmed up, measured and stopped before the next one starts, once a round: a machine's speed changes,
and a round is short. Figures are medians of the rounds. Prompts are token ids, the same lengths for all peers,
none a prefix of another; requests are greedy and streamed. A peer that is not given or fails is named in its
rows, and the run goes on. Quote the ratios: absolute figures are the machine's.
Where others use the machine too, --best takes the best of the rounds instead of the median: a rough figure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import peer_servers as servers
from peer_rows import ROWS, Key, as_data, judge, render
from tokenizers import Tokenizer

from headrace.load import WORDS
from headrace.load.profile import cpu_name
from headrace.types import EngineSettings, KVGroupSpec

FILES = {"smollm2": ("smollm2.gguf", "smollm2-hf"), "gemma3": ("gemma3-270m.gguf", "gemma3-hf")}
OUTPUT = 96
LONG, SHORT, LONG_OUTPUT = 3960, 68, 64
"""Prompts whose decodes run at a context of 4,000 and of 100 tokens in the mean."""
SETTLING_SECONDS = 2.0
"""What every peer has for itself between its warm-up and the first load, as servers have."""
KV_MEMORY = 96 << 20
"""A pool small enough for 100 requests to have written all of it."""


@dataclass(slots=True)
class Bench:
    """What was asked for, and the figures found so far."""

    options: argparse.Namespace
    rows: frozenset[str]
    found: dict[str, dict[Key, float | str]] = field(default_factory=dict)
    cores: dict[str, dict[Key, float | str]] = field(default_factory=dict)
    """Core seconds per request, where a figure is of a load of requests."""
    gathered: dict[tuple[str, Key], list[servers.Figures]] = field(default_factory=dict)
    """By peer and load, a figure a round."""
    bandwidths: list[float] = field(default_factory=list)
    """Bytes per second that two threads read, a round each."""
    _prompts: int = 0
    _words: dict[str, list[int]] = field(default_factory=dict)

    def path(self, model: str, kind: int = 0) -> Path:
        return Path(self.options.models) / FILES[model][kind]

    def wants(self, model: str, peer: str) -> list[str]:
        """Return what is to be measured of a model on a peer."""
        return [
            row.key[1]
            for row in ROWS
            if row.name in self.rows
            and row.key[0] == model
            and (peer == "headrace" or peer in row.peers)
        ]

    def prompts(self, model: str, count: int, length: int) -> list[list[int]]:
        """Return prompts of exactly `length` tokens that no request had before: common words."""
        if model not in self._words:
            tokenizer = Tokenizer.from_file(str(self.path(model, 1) / "tokenizer.json"))
            ids = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS]
            self._words[model] = [found[0] for found in ids if len(found) == 1]
        found = []
        for _ in range(count):
            self._prompts += 1
            rng = random.Random(self._prompts)
            found.append([rng.choice(self._words[model]) for _ in range(length)])
        return found

    def note(self, peer: str, key: Key, value: float | str) -> None:
        self.found.setdefault(peer, {})[key] = value
        shown = value if isinstance(value, str) else f"{value:.4g}"
        print(f"  {peer}, {key[0]} {key[1]}: {shown}", file=sys.stderr, flush=True)

    def note_load(
        self, peer: str, key: Key, value: float, figures: Sequence[servers.Figures]
    ) -> None:
        """Note a figure and, beside it, the core time per request of the cheapest round."""
        self.note(peer, key, value)
        self.cores.setdefault(peer, {})[key] = min(figure.core_seconds for figure in figures)

    def middle(self, values: Iterable[float], *, is_rate: bool = False) -> float:
        """Return the median of the rounds or, with --best, the best of them."""
        if self.options.best:
            return max(values) if is_rate else min(values)
        return median(values)

    def fail(self, peer: str, model: str, reason: str) -> None:
        """Say of everything not measured yet that it could not be."""
        for what in self.wants(model, peer):
            if (model, what) not in self.found.get(peer, {}):
                self.note(peer, (model, what), reason)


def measure_loads(bench: Bench, peer: str, model: str, loaded: servers.Loaded) -> None:
    """Measure, one round, the rows that are loads of requests."""

    def run(name: str, count: int, length: int, concurrency: int, output: int) -> None:
        figures = loaded.load(bench.prompts(model, count, length), concurrency, output)
        bench.gathered.setdefault((peer, (model, name)), []).append(figures)

    loaded.load(bench.prompts(model, 4, 120), 4, 16)
    time.sleep(SETTLING_SECONDS)
    loads = {
        "tpot": (2, 120, 1, OUTPUT),
        "ttft-120": (5, 120, 1, 2),
        "ttft-1000": (3, 1000, 1, 2),
        "rate-16": (32, 120, 16, OUTPUT),
        "rate-64": (128, 120, 64, OUTPUT),
        "long-context": (2, LONG, 1, LONG_OUTPUT),
    }
    wants = bench.wants(model, peer)
    for name, load in loads.items():
        if name in wants:
            run(name, *load)
    if "long-context" in wants:
        from roofline import read_bandwidth

        run("short-context", 2, SHORT, 1, LONG_OUTPUT)
        bench.bandwidths.append(read_bandwidth(2))


def conclude(bench: Bench, model: str) -> None:
    """Note what the rounds came to, but of peers that failed."""
    for (peer, key), figures in bench.gathered.items():
        name = key[1]
        if key[0] != model or name == "short-context" or key in bench.found.get(peer, {}):
            continue
        if name.startswith("rate"):
            rate = bench.middle((f.tokens_per_second for f in figures), is_rate=True)
            bench.note_load(peer, key, rate, figures)
        elif name == "long-context":
            conclude_contexts(bench, peer, model)
        else:
            seconds = [f.tpot if name == "tpot" else f.ttft for f in figures]
            bench.note_load(peer, key, 1e3 * bench.middle(seconds), figures)


def conclude_contexts(bench: Bench, peer: str, model: str) -> None:
    """Note how TPOT grows with the context, over what reading the keys and values takes."""
    long, short = (
        bench.middle(f.tpot for f in bench.gathered[peer, (model, name)])
        for name in ("long-context", "short-context")
    )
    bandwidth = median(bench.bandwidths)
    extra = (LONG - SHORT) * kv_bytes_per_token(bench.path(model, 1)) / bandwidth
    bench.note(peer, (model, "long-context"), (long - short) / extra)
    print(
        f"  TPOT {1e3 * short:.2f} ms at {SHORT + LONG_OUTPUT // 2}, "
        f"{1e3 * long:.2f} ms at {LONG + LONG_OUTPUT // 2} tokens; the extra keys and values "
        f"take {1e3 * extra:.2f} ms at {bandwidth / 1e9:.1f} GB/s",
        file=sys.stderr,
    )


def kv_bytes_per_token(checkpoint: Path) -> int:
    """Return the bytes of one token's keys and values in all layers, as they are served by default."""
    from headrace.backends.cpu.fast.kv_pool import FORMS, bytes_per_block
    from headrace.backends.cpu.fast.runner import chosen_kv_dtype

    config = json.loads((checkpoint / "config.json").read_text())
    layers = tuple(range(config["num_hidden_layers"]))
    shape = {"num_kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"]}
    groups = [KVGroupSpec(name="all", layers=layers, **shape)]
    form = FORMS[chosen_kv_dtype(EngineSettings(may_choose_kv_dtype=True), groups)]
    return bytes_per_block(groups, 16, form) // 16


def measure_starts(bench: Bench, model: str) -> None:
    """Measure start to ready: warm and, with an empty cache of kernels, the first ever."""
    if "start" in bench.wants(model, "headrace"):
        commands = [headrace(bench, model)]
        if bench.options.llama:
            commands.append(servers.llama_command(bench.options.llama, bench.path(model)))
        for command in commands:
            seconds = []
            for _ in range(bench.options.rounds):
                with servers.started(command) as server:
                    seconds.append(server.ready_seconds)
            bench.note(command.name, (model, "start"), bench.middle(seconds))
    if "first-start" in bench.wants(model, "headrace"):
        with tempfile.TemporaryDirectory() as cache:
            command = servers.headrace_command(
                bench.path(model), bench.options.set, cache=Path(cache)
            )
            with servers.started(command) as server:
                bench.note("headrace", (model, "first-start"), server.ready_seconds)


def measure_memory(bench: Bench, model: str) -> None:
    """Measure the engine process's own memory after 100 requests, less weights and KV pool, in MB."""
    per_block = 16 * kv_bytes_per_token(bench.path(model, 1))
    settings = [*bench.options.set, f"models.0.engine.kv_memory={KV_MEMORY}"]
    with servers.started(servers.headrace_command(bench.path(model), settings)) as server:
        server.load(bench.prompts(model, 100, 120), 16, OUTPUT)
        weights = weight_bytes(server.log.read_text(errors="replace"))
        held = servers.anonymous_bytes(server.engine_pid())
        rest = held - weights - KV_MEMORY // per_block * per_block
        bench.note("headrace", (model, "memory"), rest / 1e6)


def weight_bytes(log: str) -> float:
    """Return the bytes of the weights from what the server says when it is ready."""
    _, found, rest = log.partition("weights ")
    if not found:
        raise servers.PeerFailed("the server did not say what its weights take")
    value, unit = rest.split(";")[0].split()
    return float(value) * 1024.0 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit)


def measure_overhead(bench: Bench) -> None:
    from engine_overhead import load_tokenizer, measure

    tokenizer = load_tokenizer(bench.path("smollm2", 1) / "tokenizer.json")
    milliseconds = [measure(tokenizer, 32, {})["engine"] for _ in range(bench.options.rounds)]
    bench.note("headrace", ("", "overhead"), bench.middle(milliseconds))


def headrace(bench: Bench, model: str) -> servers.Command:
    return servers.headrace_command(bench.path(model), bench.options.set)


def measure_model(bench: Bench, model: str) -> None:
    """Measure all peers on one model: a round puts up each in its turn, and the last one vLLM too."""
    options, gguf = bench.options, bench.path(model)
    ways: Mapping[str, Callable[[], AbstractContextManager[servers.Loaded]]] = {
        "headrace": lambda: servers.started(headrace(bench, model)),
        "openvino": lambda: servers.started_openvino(options.openvino, gguf),
        "vllm": lambda: servers.started(servers.vllm_command(options.vllm, bench.path(model, 1))),
    }
    special = {"start", "first-start", "memory"}
    tpots: list[float] = []
    for number in range(options.rounds):
        for peer, start in ways.items():
            is_given = peer == "headrace" or getattr(options, peer)
            is_slow = peer == "vllm"  # a minute and a half to start
            if not is_given or (is_slow and number < options.rounds - 1):
                continue
            if not set(bench.wants(model, peer)) - special:
                continue

            def load(
                peer: str = peer,
                start: Callable[..., AbstractContextManager[servers.Loaded]] = start,
                count: int = options.rounds if is_slow else 1,
            ) -> None:
                with start() as loaded:
                    for _ in range(count):
                        measure_loads(bench, peer, model, loaded)

            attempt(bench, peer, model, load)
        if options.llama and bench.wants(model, "llama-bench"):
            attempt(bench, "llama-bench", model, lambda: measure_llama(bench, model, tpots))
    conclude(bench, model)
    if tpots and (model, "tpot") not in bench.found.get("llama-bench", {}):
        bench.note("llama-bench", (model, "tpot"), 1e3 * bench.middle(tpots))
    attempt(bench, "headrace", model, lambda: measure_starts(bench, model))
    if "memory" in bench.wants(model, "headrace"):
        attempt(bench, "headrace", model, lambda: measure_memory(bench, model))


def measure_llama(bench: Bench, model: str, tpots: list[float]) -> None:
    tpots += servers.llama_bench_tpots(bench.options.llama, bench.path(model), 120, OUTPUT, 1)


def attempt(bench: Bench, peer: str, model: str, call: Callable[[], None]) -> None:
    """Do one part of the run; what it could not measure says why."""
    try:
        call()
    except (servers.PeerFailed, OSError, ValueError, ImportError) as error:
        bench.fail(peer, model, str(error))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True)
    parser.add_argument("--llama", help="folder with bin/llama-server and bin/llama-bench")
    parser.add_argument("--openvino", help="virtual environment with openvino-genai")
    parser.add_argument("--vllm", help="virtual environment with vLLM for CPU")
    parser.add_argument("--rows", help=f"only these: {','.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--best", action="store_true", help="best of the rounds, not the median")
    parser.add_argument("--set", action="append", default=[], help="passed on to headrace serve")
    parser.add_argument("--json", help="also write everything here")
    options = parser.parse_args(arguments)
    wrong = set(options.rows.split(",")) - set(names) if options.rows else set()
    if wrong:
        parser.error(f"--rows: no row {', '.join(sorted(wrong))}; there are {', '.join(names)}")
    return options


def main() -> int:
    options = parse()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that the peer that is up is ended too
    rows = [row for row in ROWS if not options.rows or row.name in options.rows.split(",")]
    bench = Bench(options, frozenset(row.name for row in rows))
    start = time.perf_counter()
    load = os.getloadavg()[0]
    for model in FILES:
        if any(row.key[0] == model for row in rows):
            measure_model(bench, model)
    if "overhead" in bench.rows:
        attempt(bench, "headrace", "", lambda: measure_overhead(bench))
    verdicts = [judge(row, bench.found, bench.cores) for row in rows]
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu_name(),
        "load_average_before": load,
        "load_average_after": os.getloadavg()[0],
        "rounds": options.rounds,
        "figure": "best of the rounds" if options.best else "median of the rounds",
        "seconds": round(time.perf_counter() - start),
    }
    print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in about.items()) + "\n")
    print(render(verdicts))
    if options.json:
        document = {**about, "rows": as_data(verdicts)}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(verdict.met for verdict in verdicts if verdict.ratio is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
