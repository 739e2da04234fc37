"""Has memory that steps will write soon exist beforehand, in a thread of its own: nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

GRACE_SECONDS = 0.02
"""How long it must have been allowed before it begins: a request often follows right behind another one, and a
piece takes milliseconds."""


class PagePreparer:
    """Calls `prepare` piece by piece while it may, until that says False. `close` ends the thread."""

    def __init__(self, prepare: Callable[[], bool]) -> None:
        self._prepare = prepare
        self._may, self._may_not = threading.Event(), threading.Event()
        self._grace = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def allow(self, *, at_once: bool = False) -> None:
        """Go on, `at_once` or when the cores have had nothing to compute for GRACE_SECONDS."""
        if self._thread is None and not self._is_closed:
            thread = threading.Thread(target=self._run, name="headrace-pages", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: a step is on its way, and may go on
                self._is_closed = True
                _say_that_none_is_prepared(error)
                return
            self._thread = thread
        self._grace = 0.0 if at_once else GRACE_SECONDS
        self._may_not.clear()
        self._may.set()

    def pause(self) -> None:
        """Stop behind the piece that is being prepared."""
        self._may.clear()
        self._may_not.set()

    def close(self) -> None:
        """End the thread and wait for it. A second call does nothing."""
        self._is_closed = True
        self._may.set()
        self._may_not.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            self._may.wait()
            if self._is_closed:
                return
            grace, self._grace = self._grace, 0.0
            if grace and self._may_not.wait(grace):
                continue
            try:
                is_more = self._prepare()
            except Exception as error:  # what only saves time costs nobody an answer
                _say_that_none_is_prepared(error)
                return
            if not is_more:
                self._may.clear()
                if self._is_closed:  # what was cleared may have been the call to end
                    return


def _say_that_none_is_prepared(error: Exception) -> None:
    structlog.get_logger("headrace.engine").error(
        "memory could not be prepared, and will not be", exc_info=error
    )
