"""The comparison with peers: which way a ratio counts, and what a peer that fails leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def peer_rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peer_rows")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peer_servers")


def row(peer_rows: Any, name: str) -> Any:
    return next(row for row in peer_rows.ROWS if row.name == name)


def judged(peer_rows: Any, name: str, **found: float | str) -> Any:
    target = row(peer_rows, name)
    figures = {peer.replace("_", "-"): {target.key: value} for peer, value in found.items()}
    return peer_rows.judge(target, figures, {})


def test_a_time_is_met_below_its_limit_and_a_rate_above(peer_rows: Any) -> None:
    fast = judged(peer_rows, "ttft-120", headrace=60.0, openvino=100.0)
    assert (fast.ratio, fast.met) == (0.6, True)
    assert judged(peer_rows, "ttft-120", headrace=71.0, openvino=100.0).met is False
    assert judged(peer_rows, "rate-16", headrace=220.0, openvino=100.0).met is True
    assert judged(peer_rows, "rate-16", headrace=219.0, openvino=100.0).met is False


def test_the_best_peer_counts(peer_rows: Any) -> None:
    quick = judged(peer_rows, "ttft-1000", headrace=100.0, openvino=400.0, vllm=200.0)
    assert (quick.peer, quick.ratio) == ("vllm", 0.5)
    rate = judged(peer_rows, "rate-64", headrace=900.0, openvino=300.0, vllm=200.0)
    assert (rate.peer, rate.ratio, rate.met) == ("openvino", 3.0, True)


def test_a_peer_that_failed_is_named_and_the_others_count(peer_rows: Any) -> None:
    one = judged(peer_rows, "rate-64", headrace=900.0, openvino="out of memory", vllm=300.0)
    assert (one.peer, one.ratio) == ("vllm", 3.0)
    assert "openvino: out of memory" in one.note
    none = judged(peer_rows, "rate-16", headrace=900.0)
    assert none.met is None and none.ratio is None and "openvino: not given" in none.note
    ours = judged(peer_rows, "rate-16", headrace="did not start", openvino=100.0)
    assert ours.met is None and "did not start" in ours.note


def test_a_row_without_peers_is_held_against_its_limit(peer_rows: Any) -> None:
    assert judged(peer_rows, "overhead", headrace=0.9).met is True
    assert judged(peer_rows, "memory", headrace=351.0).met is False


def test_the_table_shows_figures_and_verdicts(peer_rows: Any) -> None:
    verdicts = [
        judged(peer_rows, "tpot", headrace=3.0, llama_bench=10.0),
        judged(peer_rows, "overhead", headrace=1.5),
    ]
    table = peer_rows.render(verdicts)
    assert "| llama-bench | 10.0 ms | 3.00 ms | 0.30 | - | 0.5 | 0.33 | yes |" in table
    assert "| - | - | 1.50 ms | - | - | 1 | 0.3 | **no** |" in table
    assert json.loads(json.dumps(peer_rows.as_data(verdicts)))[0]["met"] is True


def test_core_time_is_held_against_the_peer_that_the_row_names(peer_rows: Any) -> None:
    target = row(peer_rows, "rate-64")
    found = {"headrace": 900.0, "openvino": 300.0, "vllm": 200.0}
    cores = {"headrace": 0.2, "openvino": 0.5, "vllm": 0.4}
    verdict = peer_rows.judge(
        target,
        {peer: {target.key: value} for peer, value in found.items()},
        {peer: {target.key: value} for peer, value in cores.items()},
    )
    assert (verdict.peer, verdict.core_ratio) == ("openvino", 0.4)


def test_targets_are_the_ones_agreed(peer_rows: Any) -> None:
    limits = {row.name: (row.at_least, row.aim) for row in peer_rows.ROWS}
    assert limits["tpot"] == (0.5, 0.33) and limits["rate-16"] == (2.2, 3.0)
    assert limits["gemma-ttft-1000"][0] == limits["gemma-rate-64"][0] == 1.0
    assert limits["memory"] == (350, 250) and limits["first-start"][0] == 30


@contextlib.contextmanager
def answering(usage: dict[str, Any]) -> Iterator[int]:
    """A server in a thread that gives everybody two tokens and this usage."""
    loop, ports = asyncio.new_event_loop(), []
    started = threading.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.split(b":")[1]))
        events: list[Any] = [{"choices": [{"text": "a"}]}]
        events.append({"choices": [{"text": "b", "finish_reason": "length"}]})
        events.append({"choices": [], "usage": usage})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def serve() -> None:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        ports.append(listener.sockets[0].getsockname()[1])
        started.set()
        async with listener:
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(10)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2}, None),
        ({"prompt_tokens": 4, "completion_tokens": 2}, "got 4 and 2"),
        ({"prompt_tokens": 3, "completion_tokens": 1}, "got 3 and 1"),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
            "cached",
        ),
    ],
    ids=["right", "prompt", "output", "cached"],
)
def test_a_load_counts_only_with_the_tokens_asked_for(
    servers: Any, usage: dict[str, Any], reason: str | None
) -> None:
    with answering(usage) as port:
        process = types.SimpleNamespace(pid=os.getpid())
        server = servers.Server("peer", port, process, 0.0, pathlib.Path())
        if reason is None:
            assert server.load([[1, 2, 3]] * 2, 2, 2).tokens_per_second > 0
        else:
            with pytest.raises(servers.PeerFailed, match=reason):
                server.load([[1, 2, 3]], 1, 2)


def test_a_server_that_does_not_start_says_its_last_words(servers: Any) -> None:
    words = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    command = servers.Command("broken", words, "/ready")
    with pytest.raises(servers.PeerFailed, match="broken did not start: no such model"):
        with servers.started(command):
            raise AssertionError("it cannot be ready")
    missing = servers.Command("absent", ["./no-such-program"], "/ready")
    with pytest.raises(servers.PeerFailed, match="absent cannot be started"):
        with servers.started(missing):
            raise AssertionError("it cannot be ready")


def test_an_unknown_row_is_refused_with_the_names_there_are() -> None:
    script = str(BENCHMARKS / "peers.py")
    done = subprocess.run(
        [sys.executable, script, "--models", ".", "--rows", "speed"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no row speed" in done.stderr and "ttft-1000" in done.stderr
