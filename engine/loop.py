"""The engine's thread: take what came in, run one step, say what happened.

The inbox is a SimpleQueue because its `put` may be called from a signal handler. Aborts and submissions
take effect between two steps, never inside one, so the engine itself needs no lock.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from headrace.engine.policy_switch import PolicySwitch
from headrace.errors import EngineFailed, ErrorInfo, RequestError
from headrace.types import (
    Abort,
    Accepted,
    CommitPolicy,
    DropPolicy,
    EngineStats,
    FromEngine,
    GenerationRequest,
    ModelCard,
    PreparePolicy,
    Ready,
    Refused,
    StepEvents,
    Stop,
    Submit,
    ToEngine,
    TokenEvent,
)

_NOTHING_RAN_SECONDS = 0.002
"""How long to wait for a message after a step that could run nothing: neither spin nor oversleep."""
_REPORT_SECONDS = 0.02
"""Steps without news are told of no more often than this: their statistics alone."""
_REST_SECONDS = 0.5
"""Idle for so long after work, the engine has come to rest."""


class SteppedEngine(Protocol):
    """What the loop drives: headrace.engine.engine.Engine, or anything that behaves like it."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError where it can never be served, or not now."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request, whatever its stage, and free what it holds. False: no such request."""
        ...

    def step(self) -> list[TokenEvent]: ...

    def has_work(self) -> bool: ...

    def prepare(self) -> bool:
        """Use a moment without work, of milliseconds; False: nothing is left to do."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineLoop:
    """Drives one engine. `run` belongs to the engine's thread; `post` may be called from any."""

    def __init__(
        self,
        engine: SteppedEngine,
        emit: Callable[[FromEngine], object],
        on_rest: Callable[[], object] = lambda: None,
        switch: PolicySwitch | None = None,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        """`flush` is called in the engine's thread when all is emitted that there is to say for now.

        `on_rest` is called in the engine's thread, once each time the engine comes to rest.

        `switch`: the engine's policies, where they can be swapped.
        """
        self._engine = engine
        self._emit = emit
        self._on_rest = on_rest
        self._switch = switch
        self._flush = flush
        self._is_at_rest = False
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._live: dict[str, set[int]] = {}  # request id -> its choices that have not ended
        self._must_report = False
        self._accepted: list[str] = []  # requests wanted whole, told with the news of the next step
        self._reported = EngineStats()
        self._reported_at = float("-inf")
        self._num_steps = 0
        self._nothing_ran = False
        self._last_step_failed = False
        self._step_began: float | None = None
        self._log = structlog.get_logger("headrace.engine")

    def post(self, frame: ToEngine) -> None:
        """Hand over a message; it takes effect before the next step. Never blocks."""
        self._inbox.put(frame)

    @property
    def busy_seconds(self) -> float:
        """How long the engine has been inside one step, in real time; 0 between two. For any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def announce(self, card: ModelCard) -> None:
        """Say that the engine is ready, with its first numbers. Call before `run`."""
        self._report([])
        if self._switch is not None:
            self._emit(self._switch.report())
        self._emit(Ready(card))
        self._flush()

    def run(self) -> None:
        """Run until Stop. Raises what the engine raised where it cannot go on."""
        while self._drain_inbox():
            if self._engine.has_work():
                self._step_began = time.monotonic()
                self._step()
                self._step_began = None
            elif self._must_report:
                self._report([])
            self._flush()

    def _drain_inbox(self) -> bool:
        """Handle every message that is there, waiting for one while idle. False: stop."""
        if self._must_report or self._engine.has_work():
            frame = self._next_frame(_NOTHING_RAN_SECONDS if self._nothing_ran else 0)
        else:
            frame = self._rest()
        self._nothing_ran = False
        while frame is not None:
            if isinstance(frame, Stop):
                return False
            self._handle(frame)
            frame = self._next_frame(0)
        self._flush()
        return True

    def _rest(self) -> ToEngine:
        while self._engine.prepare():
            frame = self._next_frame(0)
            if frame is not None:
                return frame
        if not self._is_at_rest:
            frame = self._next_frame(_REST_SECONDS)
            if frame is not None:
                return frame
            self._on_rest()
            self._is_at_rest = True
        return self._inbox.get()

    def _next_frame(self, timeout: float) -> ToEngine | None:
        try:
            return self._inbox.get(block=timeout > 0, timeout=timeout or None)
        except queue.Empty:
            return None

    def _handle(self, frame: ToEngine) -> None:
        if isinstance(frame, Submit):
            self._submit(frame.request)
        elif isinstance(frame, Abort):
            if self._live.pop(frame.request_id, None) is not None:
                self._engine.abort(frame.request_id)
                self._must_report = True  # the gauges fell, even if no step follows
        elif self._switch is not None and isinstance(
            frame, PreparePolicy | CommitPolicy | DropPolicy
        ):
            self._switch.handle(frame, self._emit)
        else:
            self._log.warning("engine ignored a message", frame=type(frame).__name__)

    def _submit(self, request: GenerationRequest) -> None:
        request_id = request.request_id
        if request_id in self._live:
            error = EngineFailed(f"a request with the id {request_id!r} is already running")
            self._emit(Refused(request_id, error.info()))
            return
        try:
            self._engine.submit(request)
        except RequestError as refusal:
            self._emit(Refused(request_id, refusal.info()))
        except Exception as bug:
            self._log.exception("engine could not take a request", request_id=request_id)
            self._emit(Refused(request_id, _broken(bug).info()))
        else:
            self._live[request_id] = set(range(request.sampling.n))
            if request.is_whole:
                self._accepted.append(request_id)
            else:
                self._emit(Accepted(request_id))

    def _step(self) -> None:
        self._is_at_rest = False
        try:
            events = self._engine.step()
        except Exception as error:
            self._fail_live_requests(error)
            return
        self._last_step_failed = False
        for event in events:
            if event.finish_reason is not None:
                self._note_end(event)
        stats = self._engine.stats()
        self._nothing_ran = not events and stats.steps_total == self._num_steps
        self._num_steps = stats.steps_total
        if events or self._accepted or time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._report(events, stats)
        else:
            self._must_report = True  # when there is news, or nothing to do

    def _note_end(self, event: TokenEvent) -> None:
        choices = self._live.get(event.request_id)
        if choices is not None:
            choices.discard(event.index)
            if not choices:
                del self._live[event.request_id]

    def _report(self, events: list[TokenEvent], stats: EngineStats | None = None) -> None:
        self._must_report = False
        self._reported_at = time.monotonic()
        for request_id in self._accepted:
            self._emit(Accepted(request_id))
        self._accepted.clear()
        stats = stats or self._engine.stats()
        seconds = stats.step_seconds_total - self._reported.step_seconds_total
        self._reported = stats
        self._emit(StepEvents(events, stats, seconds))
        if self._switch is not None and self._switch.has_news():
            self._emit(self._switch.report())

    def _fail_live_requests(self, error: Exception) -> None:
        """End every request after a step that raised, then go on; two such steps in a row are the end.

        An engine that can fail a step's own requests does so and raises EngineFailed only when lost.
        """
        self._log.error("engine step failed", requests=len(self._live), exc_info=error)
        info = _broken(error).info()
        live, self._live = self._live, {}
        events = [_error_event(name, choice, info) for name in live for choice in live[name]]
        self._report(events)
        if self._last_step_failed or isinstance(error, EngineFailed):
            raise error
        self._last_step_failed = True
        for request_id in live:
            self._engine.abort(request_id)
        self._must_report = True


def _error_event(request_id: str, choice: int, info: ErrorInfo) -> TokenEvent:
    return TokenEvent(request_id=request_id, index=choice, finish_reason="error", error=info)


def _broken(error: Exception) -> EngineFailed:
    """The client learns the kind of error; its text, which may hold paths, stays in the log."""
    return EngineFailed(
        f"the engine failed while serving this request ({type(error).__name__}); "
        "the log of the server has the details"
    )
