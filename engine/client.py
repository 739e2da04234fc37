"""An engine as the gateway sees it: state, card, statistics, and one stream of events per request.

A ProcessEngine runs in a child process and is restarted when it dies; a ThreadEngine runs in a thread of this
process. Both speak the same frames, so a consumer cannot tell them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.child import ChildProcess, describe_exit, relay_line
from headrace.engine.heartbeat import Heartbeat
from headrace.engine.last_words import LastWords
from headrace.engine.loop import EngineLoop, SteppedEngine
from headrace.engine.outbox import Outbox
from headrace.engine.policy_control import PolicyControl as PolicyControl
from headrace.engine.policy_switch import PolicySwitch
from headrace.engine.spawn import WORKER_COMMAND
from headrace.engine.streams import ClientState as ClientState
from headrace.engine.streams import EventStream, StreamingClient, slices
from headrace.errors import EngineFailed, HeadraceError
from headrace.types import (
    EngineStats,
    Failed,
    FromEngine,
    GenerationRequest,
    ModelCard,
    Progress,
    Ready,
    StartEngine,
    Stop,
    ToEngine,
)

_STOP_SECONDS = 1.0
_TERMINATE_SECONDS = 0.3
_EXIT_STATUS_SECONDS = 1.0
_THREAD_STOP_SECONDS = 5.0


class EngineClient(Protocol):
    """Somewhere requests can run. Every method belongs to one event loop."""

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> ClientState: ...

    @property
    def progress(self) -> Progress:
        """How far the start is; meaningful while starting."""
        ...

    @property
    def card(self) -> ModelCard | None:
        """What the engine said when it was last ready; None before the first time."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Gauges of now; counters since this client was made, across restarts of the engine."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it is not ready, where something went wrong."""
        ...

    @property
    def restarts_total(self) -> int:
        """How often the engine died and was started again."""
        ...

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises EngineFailed where it cannot start."""
        ...

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[EventStream]:
        """Submit a request; the body runs once it is accepted and iterates over lists of events.

        Entering raises Unavailable where the engine is not ready, RemoteError where it refuses, and
        EngineFailed where it dies, as does iterating. While nobody iterates, events of a choice merge into
        one; where the request says `is_whole`, all that come after the first. The iteration ends when
        every choice has ended; leaving earlier aborts the request.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and end all streams with an error. A second close does nothing."""
        ...


class BuiltEngine(Protocol):
    """What headrace.build.build_engine returns: an engine whose kernels have all run once."""

    @property
    def engine(self) -> SteppedEngine: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def switch(self) -> PolicySwitch | None:
        """Its policies, where they can be swapped."""
        ...


Report = Callable[[str, float], None]


class ThreadEngine(StreamingClient):
    """An engine in a thread of this process. `build` runs in that thread; it is told where to report."""

    def __init__(self, client_id: str, build: Callable[[Report], BuiltEngine]) -> None:
        super().__init__(client_id)
        self._build = build
        self._outbox = Outbox()
        self._engine_loop: EngineLoop | None = None
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        if self._event_loop is None and self.state != "stopped":
            self._event_loop = asyncio.get_running_loop()
            name = f"engine {self._id}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        await self._wait_settled()

    async def close(self) -> None:
        self._stop_streams()
        self._stopping.set()
        if self._engine_loop is not None:
            self._engine_loop.post(Stop())
        if self._event_loop is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _THREAD_STOP_SECONDS)

    def _send(self, frame: ToEngine) -> None:
        assert self._engine_loop is not None
        self._engine_loop.post(frame)

    # --- in the engine's thread -------------------------------------------------

    def _run(self) -> None:
        engine: SteppedEngine | None = None
        try:
            built = self._build(self._report)
            engine = built.engine
            loop = self._engine_loop = EngineLoop(engine, self._emit, switch=built.switch)
            self._report("ready", 1.0)
            loop.announce(built.card)
            loop.run()
        except Exception as error:
            if not self._stopping.is_set():
                self._log.error("engine stopped", exc_info=error)
            self._emit(Failed(failure_text(error)))
        finally:
            if engine is not None:
                engine.close()
            self._call(self._end)

    def _report(self, stage: str, fraction: float) -> None:
        if self._stopping.is_set():
            raise EngineFailed("stopped while starting")
        self._emit(Progress(stage, fraction))

    def _emit(self, frame: FromEngine) -> None:
        if self._outbox.put(frame):
            self._call(self._deliver)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._event_loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
            self._event_loop.call_soon_threadsafe(function)

    # --- in the event loop ------------------------------------------------------

    def _deliver(self) -> None:
        for frame in self._outbox.take():
            self._receive(frame)

    def _end(self) -> None:
        self._deliver()
        self._set_state("failed")
        self.policies.gone()
        self._streams.fail_all(lambda: EngineFailed("the engine failed while serving this request"))
        self._ended.set()


def failure_text(error: BaseException) -> str:
    """Return what Failed says of an error: its message, with its kind where it was not on purpose."""
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class RestartRule:
    """When a dead engine process is started again."""

    first_delay_seconds: float = 0.25
    max_delay_seconds: float = 10.0
    healthy_seconds: float = 30.0
    """Having been ready this long, its next death starts again at the first delay."""
    max_failed_starts: int = 3
    """Starts in a row that end before ready; then the engine has failed for good."""


@dataclass(slots=True)
class _Life:
    """How one engine process fared."""

    reason: str
    refused: bool = False
    """It said itself why it cannot start: trying again changes nothing."""
    ready_seconds: float | None = None


class ProcessEngine(StreamingClient):
    """An engine in a child process, started again when it dies.

    `start` must be called from a thread that outlives the engine. A first start that fails for a stated
    reason (a bad configuration, an unreadable model) is final; a process that dies is started again,
    and has failed for good after several starts in a row that never became ready.
    """

    def __init__(
        self,
        client_id: str,
        config: Mapping[str, Any],
        *,
        command: Sequence[str] = WORKER_COMMAND,
        restarts: RestartRule | None = None,
        hang_seconds: float = 10.0,
    ) -> None:
        """`hang_seconds`: a ready process that gives no sign of life for so long is killed."""
        super().__init__(client_id)
        self._heartbeat = Heartbeat(client_id, hang_seconds)
        self._last_words = LastWords()
        self._config = dict(config)
        self._command = tuple(command)
        self._restarts = restarts or RestartRule()
        self._child: ChildProcess | None = None
        self._ready_since: float | None = None
        self._told_clients = ""
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs now."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        if self._supervisor is None and self.state != "stopped":
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        await self._wait_settled()

    async def close(self) -> None:
        self._stop_streams()
        supervisor, child = self._supervisor, self._child
        if supervisor is None:
            return
        if child is not None:
            child.send(Stop())
            await asyncio.wait({supervisor}, timeout=_STOP_SECONDS)
            if not supervisor.done():
                child.terminate()
                await asyncio.wait({supervisor}, timeout=_TERMINATE_SECONDS)
        supervisor.cancel()
        await asyncio.wait({supervisor})

    def _send(self, frame: ToEngine) -> None:
        if self._child is not None:
            self._child.send(frame)

    def _receive(self, frame: FromEngine) -> None:
        if isinstance(frame, Ready):
            self._ready_since = asyncio.get_running_loop().time()
        self._heartbeat.heard(frame)
        super()._receive(frame)

    async def _supervise(self) -> None:
        failed_starts = 0
        was_ever_ready = False
        delay = self._restarts.first_delay_seconds
        while True:
            life = await self._live()
            if self.state == "stopped":
                return
            if life.ready_seconds is None:
                failed_starts += 1
            else:
                failed_starts, was_ever_ready = 0, True
                if life.ready_seconds >= self._restarts.healthy_seconds:
                    delay = self._restarts.first_delay_seconds
            self._failure = life.reason
            is_final = failed_starts >= self._restarts.max_failed_starts
            is_final |= life.refused and not was_ever_ready
            if is_final and self.policies.give_up(life.reason):
                failed_starts = 0
            elif is_final:
                self._log.error("engine cannot start", reason=life.reason)
                self._set_state("failed")
                return
            self._log.error("engine died; starting it again", reason=life.reason, delay=delay)
            await asyncio.sleep(delay)
            self._restarts_total += 1
            delay = min(delay * 2, self._restarts.max_delay_seconds)

    async def _live(self) -> _Life:
        """Run one engine process from its start to its end."""
        self._ready_since = None
        self._told_clients = ""
        try:
            child = await ChildProcess.spawn(self._command, self._print)
        except (EngineFailed, OSError) as error:
            return _Life(f"the engine of replica '{self.id}' cannot be started: {error}")
        try:
            self._child = child
            config = self.policies.starting(self._config)
            child.send(StartEngine(config=config, benched=self.policies.benched))
            stated = await self._serve(child)
            return await self._bury(child, stated)
        finally:
            self._child = None
            await child.close()

    async def _serve(self, child: ChildProcess) -> str | None:
        """Take frames until the process is gone; return what it said of its end, if anything."""
        stated: str | None = None
        watch = asyncio.get_running_loop().create_task(
            self._heartbeat.watch(child, lambda: self.state == "ready")
        )
        try:
            while (frame := await child.receive()) is not None:
                if isinstance(frame, Failed):
                    stated, self._told_clients = frame.message, frame.told_clients
                for part in slices(frame):
                    self._receive(part)
                    if part is not frame:
                        await asyncio.sleep(0)
        except EngineFailed as error:
            return f"it broke the protocol: {error}"
        finally:
            watch.cancel()
        return stated

    async def _bury(self, child: ChildProcess, stated: str | None) -> _Life:
        """Find out how the process ended and end its streams with that."""
        loop = asyncio.get_running_loop()
        ready_seconds = None if self._ready_since is None else loop.time() - self._ready_since
        self._set_state("starting")
        exited = await child.wait_exit(_EXIT_STATUS_SECONDS)
        code = child.exit_code
        how = describe_exit(code) if exited and code is not None else "closed its connection"
        how = self._heartbeat.take_verdict() or how
        kind = self._last_words.take_kind()
        if kind:
            how += f" inside its {kind} policy"
            self.policies.bench(kind, f"the engine process {how}")
        name = f"the engine process of replica '{self.id}'"
        why = f" ({self._told_clients})" if self._told_clients else ""
        self.policies.gone()
        self._streams.fail_all(
            lambda: EngineFailed(
                f"{name} {how}{why} while serving this request; it is being restarted"
            )
        )
        if stated is not None:
            return _Life(stated, refused=True, ready_seconds=ready_seconds)
        last = child.last_lines()
        reason = f"{name} {how}" + (f"\nits last output:\n{last}" if last else "")
        return _Life(reason, ready_seconds=ready_seconds)

    def _print(self, line: str) -> None:
        self._last_words.note(line)
        relay_line(self._log, line)
