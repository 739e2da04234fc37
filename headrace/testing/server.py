"""A real server in a child process, for tests, benchmarks and `headrace bench`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.errors import HeadraceError

_DEFAULTS = {"HEADRACE_GATEWAY__GRACE_PERIOD": "0s"}
"""Told to stop, a server under test ends at once; a test of the grace period gives its own by a flag."""


@dataclass(slots=True)
class StartedServer:
    """A `headrace serve` that listens; `output` grows with what it prints."""

    url: str
    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def wait_ready(self, timeout_seconds: float = 120.0) -> None:
        """Return when /ready answers 200. Raises HeadraceError with the output if it ends or takes too long."""
        import httpx

        deadline = time.monotonic() + timeout_seconds
        with httpx.Client(timeout=10) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    break
                try:
                    if client.get(f"{self.url}/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
        raise HeadraceError(
            f"the server at {self.url} was not ready (exit code {self.process.poll()}):\n"
            + "".join(self.output[-50:])
        )

    def stop(self, timeout_seconds: float = 10.0) -> int:
        """Send SIGTERM and return the exit code; kill it after the timeout."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def started_server(
    arguments: Sequence[str] = (),
    *,
    ready: bool = True,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "headrace"),
    cwd: str | None = None,
) -> Iterator[StartedServer]:
    """Start `headrace serve` on a free port of 127.0.0.1, yield it (ready by default), then end it."""
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        cwd=cwd,
        env={**os.environ, **_DEFAULTS, **(environment or {}), "PYTHONUNBUFFERED": "1"},
    )
    server = StartedServer(url="", process=process)
    listening = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.output.append(line)
            found = re.search(r"listening on (http://\S+)", line)
            if found and not server.url:
                server.url = found.group(1)
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        listening.wait(timeout_seconds)
        if not server.url:
            process.wait(5)
            raise HeadraceError("the server did not start:\n" + "".join(server.output))
        if ready:
            server.wait_ready(timeout_seconds)
        yield server
    finally:
        server.stop()
        reader.join(5)
        if process.stdout is not None:
            process.stdout.close()
