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


def core_seconds(pid: int) -> float:
    """What a process and its children have used of cores so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return used + sum(core_seconds(int(child)) for child in children)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_takes_no_core_time(real_server: StartedServer) -> None:
    time.sleep(1.0)  # workers park milliseconds after the last step
    pid = real_server.process.pid
    before, started = core_seconds(pid), time.monotonic()
    time.sleep(SECONDS)
    share = (core_seconds(pid) - before) / (time.monotonic() - started)
    assert share < MOST
    assert before > 0.5  # of both processes' starts: the engine's is counted
