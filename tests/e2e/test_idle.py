"""A server that nobody asks takes next to no time of a core, gateway and engine together."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from headrace.testing.server import StartedServer

SECONDS = 3.0
MOST = 0.03
"""Of a core: thrice what is promised, for busy machines."""
PREPARING_SECONDS = 30.0
"""How long it may make memory of the KV pool exist that steps will write."""


def core_seconds(pid: int) -> float:
    """What a process and its children have used of cores so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return used + sum(core_seconds(int(child)) for child in children)


def core_share(pid: int, seconds: float) -> float:
    """Of a core, while so much time passes."""
    before, started = core_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (core_seconds(pid) - before) / (time.monotonic() - started)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_takes_no_core_time(real_server: StartedServer) -> None:
    pid, begun = real_server.process.pid, time.monotonic()
    while core_share(pid, 0.5) >= MOST and time.monotonic() - begun < PREPARING_SECONDS:
        pass
    assert core_share(pid, SECONDS) < MOST
    assert core_seconds(pid) > 0.5  # of both processes' starts: the engine's is counted
