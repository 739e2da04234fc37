"""A real Redis of a test's own, on a Unix socket in a folder of the test's own."""

from __future__ import annotations

import pathlib
import shutil
import socket
import subprocess
import time

from headrace.errors import HeadraceError


class RedisServer:
    """Starts with `start`, dies at once with `kill`, and keeps nothing on disk."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    def start(self, timeout_seconds: float = 20.0) -> RedisServer:
        """Return when it answers. Raises HeadraceError where it does not in time."""
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket)]
        self._process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no", "--dir", str(self._socket.parent)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self._socket))
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16).startswith(b"+PONG"):
                        return self
            except OSError:
                pass
            time.sleep(0.01)
        self.kill()
        raise HeadraceError("redis-server does not answer")

    def kill(self) -> None:
        """End it as a crash would; a second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
