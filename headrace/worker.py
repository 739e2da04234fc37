"""The engine process: `python -m headrace.worker --socket PATH`, started by headrace.engine.client.

The main thread is the engine's; one thread reads the socket, and one writes what the main thread cannot
write at once. The process never outlives its parent: the kernel kills it on Linux, the end of the socket
does everywhere, whatever the engine is doing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from headrace.engine.client import BuiltEngine, failure_text
from headrace.engine.ipc import FrameSocket
from headrace.engine.loop import EngineLoop, SteppedEngine
from headrace.engine.outbox import Outbox
from headrace.engine.sender import Sender
from headrace.engine.spawn import SHOW_WHERE_SIGNAL
from headrace.errors import EngineFailed, HeadraceError
from headrace.heap import keep_what_is_loaded, return_free_memory
from headrace.logs import configure_logging, get_logger
from headrace.types import Failed, Ping, Pong, Progress, StartEngine, Stop

_STOP_SECONDS = 0.8
_ORPHAN_SECONDS = 0.5
_FLUSH_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class Build(Protocol):
    """headrace.build.build_engine, or a test's stand-in for it."""

    def __call__(
        self, replica: Mapping[str, Any], *, report: Callable[[str, float], None]
    ) -> BuiltEngine: ...


class Worker:
    """One engine served over one connection."""

    def __init__(self, frames: FrameSocket, build: Build) -> None:
        self._frames = frames
        self._build = build
        self._outbox = Outbox()
        self._sender = Sender(self._outbox, frames)
        self._loop: EngineLoop | None = None

    def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        self._watch_signals()
        engine: SteppedEngine | None = None
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        try:
            start = self._frames.receive()
            if not isinstance(start, StartEngine):
                return 1
            level = start.config.get("logging", {}).get("level", "info")
            configure_logging("json", level)  # for the parent, which relays it in its own format
            writer.start()
            threading.Thread(target=self._read, name="reader", daemon=True).start()
            built = self._build(start.config, report=self._report)
            engine = built.engine
            self._loop = EngineLoop(
                engine,
                functools.partial(self._outbox.put, wakes=False),
                return_free_memory,
                switch=built.switch,
                flush=self._sender.flush,
            )
            if built.switch is not None:
                built.switch.watchdog.on_stuck = self._give_up
                built.switch.bench(start.benched)
            keep_what_is_loaded()
            self._loop.announce(built.card)
            self._loop.run()
            return 0
        except Exception as error:
            if not isinstance(error, HeadraceError):
                _log().error("engine failed", exc_info=error)
            self._outbox.put(Failed(failure_text(error)))
            return 1
        finally:
            self._outbox.close()
            if writer.is_alive():
                writer.join(_FLUSH_SECONDS)
            if engine is not None:
                engine.close()

    def _report(self, stage: str, fraction: float) -> None:
        self._outbox.put(Progress(stage, fraction))

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Leave after this step; give up a start."""
        if self._loop is None:
            raise SystemExit(0)
        self._loop.post(Stop())

    def _leave(self, patience: float) -> None:
        """Make the main thread end, whatever it does; called from any other thread."""
        if self._loop is not None:
            self._loop.post(Stop())
        else:
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(patience)
        os._exit(0)  # the engine is inside a step or a load that does not end

    def _give_up(self, reason: str) -> None:
        """End the process, whatever its main thread does; called by the watchdog's thread."""
        _log().error("engine gives up", reason=reason)
        faulthandler.dump_traceback()  # says which policy it is
        self._outbox.put(Failed(reason, told_clients=reason))
        self._outbox.close()
        time.sleep(_FLUSH_SECONDS)
        os._exit(1)

    def _watch_signals(self) -> None:
        """Act on SIGTERM in a thread of its own, which the kernel wakes through a pipe.

        A handler runs only when the main thread next runs Python, and a signal that arrives just before
        that thread falls asleep does not wake it.
        """
        signal.signal(signal.SIGTERM, self._on_terminate)
        if sys.platform != "win32":
            faulthandler.register(SHOW_WHERE_SIGNAL)
        reading_end, writing_end = os.pipe()
        os.set_blocking(writing_end, False)
        signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)

        def watch() -> None:
            os.read(reading_end, 1)
            self._leave(_STOP_SECONDS)

        threading.Thread(target=watch, name="signals", daemon=True).start()

    # --- the reader's thread ----------------------------------------------------

    def _read(self) -> None:
        patience = _ORPHAN_SECONDS
        try:
            while (frame := self._frames.receive()) is not None:
                if isinstance(frame, Stop):
                    patience = _STOP_SECONDS
                    break
                if isinstance(frame, Ping):
                    busy = self._loop.busy_seconds if self._loop is not None else 0.0
                    self._outbox.put(Pong(busy))
                elif self._loop is not None:
                    self._loop.post(frame)
        except (EngineFailed, OSError) as error:
            _log().error("engine cannot read its socket", exc_info=error)
        self._leave(patience)

    # --- the writer's thread ----------------------------------------------------

    def _write(self) -> None:
        try:
            self._sender.run()
        except OSError:
            return  # the parent is gone: the reader knows
        except Exception as error:
            _log().error("engine cannot send a frame", exc_info=error)
            os._exit(1)  # a frame that cannot be sent: its request would wait for ever


def _log() -> Any:
    return get_logger("headrace.worker")


def die_with_parent() -> None:
    """Ask the kernel, on Linux, to kill this process when the thread that spawned it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: Sequence[str] | None = None, *, build: Build | None = None) -> int:
    """Connect to the parent's socket and serve an engine on it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headrace.worker", description=__doc__)
    parser.add_argument("--socket", required=True, help="the Unix socket to connect to")
    parser.add_argument(
        "--preload", action="append", default=[], help="a module to import before it is needed"
    )
    parsed = parser.parse_args(arguments)
    path = parsed.socket
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        sys.stderr.write(f"cannot connect to {path}: {error}\n")
        return 1
    with contextlib.closing(connection):
        for module in parsed.preload:
            with contextlib.suppress(Exception):  # whoever needs it says so
                importlib.import_module(module)
        return Worker(FrameSocket(connection), build or _build_configured).run()


def _build_configured(
    replica: Mapping[str, Any], *, report: Callable[[str, float], None]
) -> BuiltEngine:
    from headrace.build import build_engine

    return build_engine(replica, report=report)


if __name__ == "__main__":
    sys.exit(main())
