"""Cuts off a call that takes too long: a thread raises PolicyTimeout inside it.

Arming is one assignment, so a call costs next to nothing. Who owns a call's end is settled by
`dict.setdefault`, which is one step of the interpreter: no lock could be held by a thread that
an exception may reach between any two of its instructions.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_TICK_SECONDS = 0.02
_IDLE_TICKS = 100
_COLLECTION_SECONDS_MAX = 1.0
"""So much garbage collection is not held against one call; what collects without end is cut off."""
_CALLER, _WATCHDOG = "caller", "watchdog"


class PolicyTimeout(BaseException):
    """Raised inside a policy that has used up its time. Not an Exception, so that few catch it."""


_send_from_trace = ctypes.PYFUNCTYPE(
    None, ctypes.c_ulong, ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object
)(("PyThreadState_SetAsyncExc", ctypes.pythonapi))
"""Ignores what a trace function is told. Not Python: the exception would arrive in it, ending the trace."""


class _InsistentTimeout(PolicyTimeout):
    """For a call that caught the first one: from here on every line and call of it is sent another.

    The interpreter builds the exception in the thread it was sent to, when a frame is about to
    catch it; that is the moment to have the frames of the call traced.
    """

    def __init__(self) -> None:
        super().__init__("out of time")
        frame: FrameType | None = sys._getframe(1)
        traced = []
        while frame is not None and frame.f_code is not Watchdog.call.__code__:
            traced.append(frame)
            frame = frame.f_back
        if frame is None or not traced:
            return
        insist = functools.partial(_send_from_trace, threading.get_ident(), PolicyTimeout)
        for each in traced:
            each.f_trace = insist
        sys.settrace(insist)


class _Call:
    """One call under way. `owner` holds who may end it: the caller, or the watchdog while it fires."""

    __slots__ = ("deadline", "is_reported", "latest", "num_fired", "owner", "seconds")

    def __init__(self, deadline: float, seconds: float) -> None:
        self.deadline = deadline
        self.latest = deadline + _COLLECTION_SECONDS_MAX
        self.seconds = seconds
        self.num_fired = 0
        self.is_reported = False
        self.owner: dict[str, str] = {}


class Watchdog:
    """Looks after the calls of every thread that arms it, in one thread that ends while there are none."""

    def __init__(self, *, stuck_after_seconds: float = 10.0) -> None:
        """`stuck_after_seconds`: so long past its time, a call is inside C code and nothing reaches it."""
        self.stuck_after_seconds = stuck_after_seconds
        self.on_stuck: Callable[[str], object] | None = None
        """Told once why, in the watchdog's thread, where a call is stuck: only ending the process helps."""
        self._calls: dict[int, _Call] = {}
        self._is_asleep = True
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
        """Return `function(*arguments)`; raise PolicyTimeout where it takes much longer than `seconds`."""
        thread_id = threading.get_ident()
        calls = self._calls
        if thread_id in calls:  # one policy calls another: the outer call's time counts
            return function(*arguments)
        call = _Call(time.perf_counter() + seconds, seconds)
        tracer = sys.gettrace()
        try:
            calls[thread_id] = call
            if self._is_asleep:
                self._rouse()
            return function(*arguments)
        finally:
            while True:
                try:
                    if call.num_fired:
                        sys.settrace(tracer)
                    if call.owner.setdefault("owner", _CALLER) is _CALLER:
                        if call.num_fired:
                            _clear_pending(thread_id)
                        calls.pop(thread_id, None)
                        break
                    time.sleep(0)
                except PolicyTimeout:
                    continue

    def _rouse(self) -> None:
        with self._lock:
            if self._is_asleep:
                self._is_asleep = False
                threading.Thread(target=self._watch, name="policy watchdog", daemon=True).start()

    # --- in the watchdog's thread -----------------------------------------------

    def _watch(self) -> None:
        num_idle = 0
        now, num_collections = _time_and_num_full_collections()
        while num_idle < _IDLE_TICKS or not self._may_end():
            time.sleep(_TICK_SECONDS)
            before, collected_before = now, num_collections
            now, num_collections = _time_and_num_full_collections()
            under_way = list(self._calls.items())
            num_idle = 0 if under_way else num_idle + 1
            for thread_id, call in under_way:
                if (
                    num_collections != collected_before
                ):  # they are the whole process's and stop everybody
                    lost = now - before  # with the tick: a call may have begun at its end
                    call.deadline = min(call.deadline + lost, call.latest)
                self._look_after(thread_id, call, now)

    def _may_end(self) -> bool:
        """Whether this thread can end: a call that came meanwhile has started another one, or none came."""
        self._is_asleep = True
        if not self._calls:
            return True
        with self._lock:
            if not self._is_asleep:
                return True
            self._is_asleep = False
            return False

    def _look_after(self, thread_id: int, call: _Call, now: float) -> None:
        late = now - call.deadline
        if late < 0:
            return
        if late > self.stuck_after_seconds and self.on_stuck is not None and not call.is_reported:
            call.is_reported = True
            seconds = call.seconds + late
            self.on_stuck(
                f"a policy has been inside one call of compiled code for {seconds:.0f} s, where "
                "nothing can stop it"
            )
        if call.owner.setdefault("owner", _WATCHDOG) is not _WATCHDOG:
            return
        call.num_fired += 1
        kind = PolicyTimeout if call.num_fired == 1 else _InsistentTimeout
        _raise_in(thread_id, kind)
        del call.owner["owner"]


def _num_full_collections() -> int:
    """Return how often all garbage was collected, which takes as long as the process is large."""
    return int(gc.get_stats()[-1]["collections"])


def _time_and_num_full_collections() -> tuple[float, int]:
    """Return both as they were at one moment: a collection between two readings would be held against calls."""
    while True:
        num_collections = _num_full_collections()
        now = time.perf_counter()
        if _num_full_collections() == num_collections:
            return now, num_collections


def _raise_in(thread_id: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))


def _clear_pending(thread_id: int) -> None:
    """Drop an exception that was sent to a thread and has not arrived."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)
