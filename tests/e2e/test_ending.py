"""How a server ends, told to or killed: with its engine, its sockets and its memory, and without noise."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from headrace.testing.live import RawClient, until_numbers
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

LONG = {"prompt": "x", "max_tokens": 4000, "stream": True}
NOISE = ("killed", "leaked", "Traceback", "Warning", "[error", "[warning")


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.json"
    return f"scripted:{write_script(path, ['Hi'] * 40, eos=False, step_delay_seconds=0.02)}"


@pytest.fixture
def temporary(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def children(server: StartedServer) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(server.process.pid).children(recursive=True)
    assert found, "there is an engine process"
    return found


def shared_memory(processes: list[psutil.Process]) -> list[pathlib.Path]:
    """The files in shared memory that these processes use, by the map of their memory."""
    maps = [pathlib.Path(f"/proc/{process.pid}/maps") for process in processes]
    lines = [line for path in maps if path.exists() for line in path.read_text().splitlines()]
    return [pathlib.Path(line.split()[-1]) for line in lines if " /dev/shm/" in line]


def put_under_load(url: str) -> list[RawClient]:
    clients = [RawClient(url).post("/v1/completions", LONG) for _ in range(4)]
    until_numbers(url, lambda now: now.value("requests_running") == len(clients))
    return clients


@pytest.mark.parametrize("load", [True, False], ids=["under load", "idle"])
def test_a_normal_stop_is_quiet_and_leaves_nothing(
    script: str, temporary: pathlib.Path, load: bool
) -> None:
    """X03: the engine cleans up for itself; no warning, no socket, no shared memory is left."""
    environment = {"TMPDIR": str(temporary)}
    with started_server(["--model", script], environment=environment) as server:
        engines = children(server)
        clients = put_under_load(server.url) if load else []
        shared = shared_memory([*engines, psutil.Process(server.process.pid)])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert psutil.wait_procs(engines, timeout=5)[1] == []
        for client in clients:
            assert b'"finish_reason":"stop"' not in client.read_to_end()
            client.leave()
    said = "".join(server.output)
    if load:  # each of its requests ends with an error, which is told
        said = "".join(line for line in server.output if "request f" not in line)
    assert [word for word in NOISE if word in said] == [], said
    assert list(temporary.iterdir()) == []
    assert not any(path.exists() for path in shared)


@pytest.mark.parametrize("load", [True, False], ids=["under load", "idle"])
def test_a_killed_gateway_takes_its_engine_along(
    script: str, temporary: pathlib.Path, load: bool
) -> None:
    """X02: SIGKILL, under load and idle; the engine is gone within seconds, with what it held."""
    environment = {"TMPDIR": str(temporary)}
    with started_server(["--model", script], environment=environment) as server:
        engines = children(server)
        clients = put_under_load(server.url) if load else []
        shared = shared_memory([*engines, psutil.Process(server.process.pid)])
        server.process.kill()
        server.process.wait(10)
        assert psutil.wait_procs(engines, timeout=5)[1] == []
        for client in clients:
            assert b"[DONE]" not in client.read_to_end()
            client.leave()
    assert list(temporary.iterdir()) == []
    assert not any(path.exists() for path in shared)


def test_a_stop_before_anything_listens(script: str, temporary: pathlib.Path) -> None:
    """X01, X03: exit code 0 and nothing left, as later; a SIGHUP that comes so early ends nothing."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--model", script]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment) as process:
        engines: list[psutil.Process] = []
        while not engines:
            assert process.poll() is None
            engines = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert psutil.wait_procs(engines, timeout=30)[1] == []
    assert list(temporary.iterdir()) == []


def test_a_second_signal_forces_the_end(script: str) -> None:
    """X01: the first stops, the second does not wait for anybody; exit code 0 both times."""
    with started_server(["--model", script]) as server:
        clients = put_under_load(server.url)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        for client in clients:
            client.leave()
    assert "Traceback" not in "".join(server.output)
