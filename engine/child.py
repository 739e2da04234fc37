"""One engine process as its parent sees it: spawn, frames, output, signals, exit status.

The process must be spawned from a thread that lives as long as it does: on Linux the child asks the kernel
to be killed when the thread that spawned it ends. The socket's folder is private, and gone as soon
as both ends are connected, so that a parent killed at any time leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.engine.ipc import encode_frame, read_frame
from headrace.engine.spawn import SHOW_WHERE_SIGNAL, kill, take
from headrace.errors import EngineFailed
from headrace.types import FromEngine, ToEngine

_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 12
_MAX_LINE_BYTES = 16 << 10


def describe_exit(code: int) -> str:
    """Return "exited with code 1" or "was killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def relay_line(log: Any, line: str) -> None:
    """Say in our log what an engine process printed: its own events as such, anything else as a warning."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        event, level = str(fields.pop("event")), str(fields.pop("level"))
    except (msgspec.MsgspecError, KeyError):
        log.warning(line)
        return
    fields.pop("timestamp", None)
    say = {"debug": log.debug, "info": log.info, "warning": log.warning}.get(level, log.error)
    say(event, **fields)


class ChildProcess:
    """A connected engine process. All methods belong to the event loop's thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: _Output,
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._output = output
        self._unsent: list[bytes] = []

    @classmethod
    async def spawn(cls, command: Sequence[str], on_line: Callable[[str], None]) -> ChildProcess:
        """Start `command --socket PATH`, or take one started early, and wait until it has connected.

        `on_line` is told each line the process prints. Raises EngineFailed where it ends or stays
        away instead, and OSError where it cannot be started.
        """
        started = take(command)
        process = started.process
        output: _Output | None = None
        try:
            output = await _Output.open(process, on_line)
            connection = await _accept(started.listener, process, output)
            streams = await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            await _end(process)
            if output is not None:
                await output.close()
            raise
        finally:
            started.forget_socket()
        return cls(process, streams, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it; None: it runs."""
        return self._process.poll()

    def last_lines(self) -> str:
        """Return the last lines it printed."""
        return "\n".join(self._output.tail)

    def send(self, frame: ToEngine) -> None:
        """Queue a frame for the process; nothing happens where it is gone.

        What is sent within one turn of the event loop goes out in one system call.
        """
        data = encode_frame(frame)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if data and not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> FromEngine | None:
        """Wait for the next frame; None once the process is gone."""
        return await read_frame(self._reader)

    async def wait_exit(self, seconds: float) -> bool:
        """Wait for the process to end by itself; False where it did not in time."""
        return await _wait_exit(self._process, seconds)

    def show_where(self) -> None:
        """Have it print where each of its threads is, whatever it does; nothing on Windows."""
        if sys.platform != "win32":
            self._process.send_signal(SHOW_WHERE_SIGNAL)

    def terminate(self) -> None:
        """Ask it to leave (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its own children, running or stopped (SIGKILL); its connection then ends."""
        kill(self._process)

    async def close(self) -> None:
        """Kill the process and its own children if they still run, reap it, close every descriptor."""
        self._flush()
        await _end(self._process)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._output.close()


class _Output:
    """What the process prints, line by line; the last lines are kept to explain a crash."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_line = on_line
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, process: subprocess.Popen[bytes], on_line: Callable[[str], None]
    ) -> _Output:
        output = cls(on_line)
        loop = asyncio.get_running_loop()
        output._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output._reader), process.stdout
        )
        output._task = loop.create_task(output._forward())
        return output

    async def _forward(self) -> None:
        rest = b""
        while data := await self._reader.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._say(line)
        if rest:
            self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self.tail.append(text)
            self._on_line(text)

    async def drain(self, seconds: float) -> None:
        """Wait a moment for the last words of a process that has ended."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    async def close(self) -> None:
        await self.drain(0.2)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._transport is not None:
            self._transport.close()


async def _accept(
    listener: socket.socket, process: subprocess.Popen[bytes], output: _Output
) -> socket.socket:
    loop = asyncio.get_running_loop()
    accepting = loop.create_task(_accept_one(listener))
    deadline = loop.time() + _CONNECT_SECONDS
    try:
        while not accepting.done():
            await asyncio.wait({accepting}, timeout=_POLL_SECONDS)
            code = process.poll()
            if accepting.done():
                break
            if code is not None:
                await output.drain(0.2)
                last = "\n".join(output.tail)
                raise EngineFailed(
                    f"the engine process {describe_exit(code)} before it could start"
                    + (f"\nits last output:\n{last}" if last else "")
                )
            if loop.time() > deadline:
                raise EngineFailed(
                    f"the engine process did not connect within {_CONNECT_SECONDS:.0f} s"
                )
        return accepting.result()
    finally:
        accepting.cancel()


async def _accept_one(listener: socket.socket) -> socket.socket:
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.setblocking(False)
    return connection


async def _wait_exit(process: subprocess.Popen[bytes], seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause = 0.001
    while process.poll() is None:
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(pause)
        pause = min(pause * 2, _POLL_SECONDS)
    return True


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its session, and reap it."""
    if process.poll() is None:
        kill(process)
        await _wait_exit(process, 5.0)
