"""Whether an engine process still lives: it is asked at intervals, and killed where it does not answer.

A thread of its own answers in the process, so that a long step is no silence; a step that never ends
shows in what it answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.engine.child import ChildProcess
from headrace.types import FromEngine, Ping, Pong

_PINGS_PER_HANG = 4
_STEP_PER_HANG = 12
"""A step may take so many times the time a silence may."""
_LAST_WORDS_SECONDS = 0.25
"""For the process to print where it hangs, and for us to read it."""


class Heartbeat:
    """The sign of life of one engine process after the other."""

    def __init__(self, client_id: str, hang_seconds: float) -> None:
        self._id = client_id
        self._hang_seconds = hang_seconds
        self._heard_at = 0.0
        self._busy_seconds = 0.0
        self._verdict = ""

    def heard(self, frame: FromEngine) -> None:
        """Note a frame: whatever it says, the process lives."""
        self._heard_at = time.monotonic()
        if isinstance(frame, Pong):
            self._busy_seconds = frame.busy_seconds

    def take_verdict(self) -> str:
        """Return why the process was killed, once; "" where it was not."""
        verdict, self._verdict = self._verdict, ""
        return verdict

    async def watch(self, child: ChildProcess, is_watched: Callable[[], bool]) -> None:
        """Ask at intervals and kill a process that hangs. Runs until then or until cancelled.

        Only while `is_watched()`: loading a model may hold a process up for as long as it takes.
        """
        interval = self._hang_seconds / _PINGS_PER_HANG
        asked_at: float | None = None
        while True:
            await asyncio.sleep(interval)
            if not is_watched():
                asked_at = None
                continue
            silence = time.monotonic() - max(self._heard_at, asked_at or time.monotonic())
            if silence > self._hang_seconds:
                self._verdict = f"gave no sign of life for {silence:.1f} s and was killed"
            elif self._busy_seconds > self._hang_seconds * _STEP_PER_HANG:
                self._verdict = f"was inside one step for {self._busy_seconds:.0f} s and was killed"
            if self._verdict:
                log = structlog.get_logger("headrace.engine")
                log.error("engine hangs", replica=self._id, verdict=self._verdict)
                self._busy_seconds = 0.0
                child.show_where()
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                child.kill()
                return
            if asked_at is None or self._heard_at >= asked_at:
                asked_at = time.monotonic()
                child.send(Ping())
