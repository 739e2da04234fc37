"""Tells observers what happened without letting them hold up the event loop or the end.

Observers are other people's code and may block, so one thread calls them in order; a queue that
grows past its bound loses facts, which is logged and counted, rather than memory. The thread is a
daemon: at the end it has a moment for what is queued, and one that blocks keeps nobody from leaving.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from headrace.types import RequestSummary

_CLOSE_SECONDS = 0.5
_logger = structlog.get_logger(__name__)


class FinishedObserver(Protocol):
    """pm.hook.headrace_request_finished, or anything called like it."""

    def __call__(self, *, summary: RequestSummary) -> object: ...


class Observers:
    """Calls every observer once per finished request, in order, on a thread of its own."""

    def __init__(
        self, observers: Sequence[FinishedObserver] = (), *, max_pending: int = 4096
    ) -> None:
        self._observers = tuple(observers)
        self._max_pending = max_pending
        self._pending = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def request_finished(self, summary: RequestSummary) -> None:
        """Queue one fact; never raises and never waits."""
        if self._observers:
            self.submit(functools.partial(self._tell_finished, summary))

    def submit(self, tell: Callable[[], object]) -> None:
        """Queue one call of other people's code; never raises and never waits."""
        with self._lock:
            if self._pending >= self._max_pending:
                self.num_dropped += 1
                dropped = self.num_dropped
            else:
                self._pending += 1
                dropped = 0
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="headrace-observers", daemon=True
                    )
                    self._thread.start()
        if dropped:
            _logger.warning("observers are too slow: a fact was dropped", total=dropped)
            return
        self._queue.put(tell)

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Wait until every queued fact was told, but no longer than the timeout."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _logger.warning("observers are too slow: the end did not wait", untold=self._pending)

    def _run(self) -> None:
        while (tell := self._queue.get()) is not None:
            try:
                tell()
            except (Exception, SystemExit) as error:
                _logger.warning("observer failed", error=repr(error))
            finally:
                with self._lock:
                    self._pending -= 1

    def _tell_finished(self, summary: RequestSummary) -> None:
        for observer in self._observers:
            observer(summary=summary)
