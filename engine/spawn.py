"""Starts engine processes, and may start one before the event loop that will talk to it exists.

Light to import on purpose: the command starts its first worker here, and both processes then import what
they need at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

WORKER_COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "headrace.worker")
"""-P: a folder named headrace where the server was started must not shadow the package."""
SHOW_WHERE_SIGNAL = signal.SIGUSR2 if sys.platform != "win32" else signal.SIGTERM
"""Has a worker print where its threads are; it is sent and caught on POSIX only."""
_MAX_SOCKET_PATH_BYTES = 100


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process told to connect to a listening socket in a private folder."""

    process: subprocess.Popen[bytes]
    listener: socket.socket
    folder: str

    def forget_socket(self) -> None:
        """Close the listener and remove its folder; a connection stays."""
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self) -> None:
        """Kill the process, reap it and close all that belongs to it."""
        kill(self.process)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.forget_socket()


def start(command: Sequence[str]) -> StartedProcess:
    """Start `command --socket PATH`. OSError where it cannot be started."""
    folder = _socket_folder()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = os.path.join(folder, "engine")
        listener.bind(path)
        listener.listen(1)
        listener.setblocking(False)
        process = subprocess.Popen(
            [*command, "--socket", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only the parent
        )
    except BaseException:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return StartedProcess(process, listener, folder)


_early: list[tuple[tuple[str, ...], StartedProcess]] = []


def start_early(command: Sequence[str], arguments: Sequence[str] = ()) -> None:
    """Start a process that the first `take(command)` returns; nobody's is killed when this process ends.

    Call it from a thread that lives as long as the process shall. One that cannot be started is left to `take`.
    """
    if not _early:
        atexit.register(_end_early)
    with contextlib.suppress(OSError):
        _early.append((tuple(command), start([*command, *arguments])))


def take(command: Sequence[str]) -> StartedProcess:
    """Return a process of this command: one that was started early, or a new one."""
    for index, (known, started) in enumerate(_early):
        if known == tuple(command):
            del _early[index]
            if started.process.poll() is None:
                return started
            started.end()
            break
    return start(command)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its session; one that is reaped already has a number that may be another's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_early() -> None:
    for _, started in _early:
        started.end()
    _early.clear()


def _socket_folder() -> str:
    """Return a new folder that only this user can enter, its path short enough for a socket's address."""
    folder = tempfile.mkdtemp(prefix="headrace-")
    if len(os.fsencode(folder)) <= _MAX_SOCKET_PATH_BYTES - len("/engine"):
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="headrace-", dir="/tmp")
