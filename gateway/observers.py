"""Tells observers of finished requests without letting them hold up the event loop.

Observers are other people's code and may block, so one thread calls them in order; a queue that
grows past its bound loses facts, which is logged and counted, rather than memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from headrace.types import RequestSummary

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
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-observers")
        self.num_dropped = 0

    def request_finished(self, summary: RequestSummary) -> None:
        """Queue one fact; never raises and never waits."""
        if not self._observers:
            return
        with self._lock:
            if self._pending >= self._max_pending:
                self.num_dropped += 1
                dropped = self.num_dropped
            else:
                self._pending += 1
                dropped = 0
        if dropped:
            _logger.warning("observers are too slow: a finished request was dropped", total=dropped)
            return
        self._executor.submit(self._tell, summary)

    def _tell(self, summary: RequestSummary) -> None:
        try:
            for observer in self._observers:
                observer(summary=summary)
        except Exception as error:
            _logger.warning("observer failed", hook="headrace_request_finished", error=repr(error))
        finally:
            with self._lock:
                self._pending -= 1

    def close(self) -> None:
        """Wait until every queued fact was told."""
        self._executor.shutdown(wait=True)
