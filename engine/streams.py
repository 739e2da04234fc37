"""One engine's frames in, one stream of events per request out; all of it in the event loop's thread.

A stream holds at most one joined event per choice, so a consumer that does not read costs its own
max_tokens and delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Literal

import msgspec
import structlog

from headrace.engine.outbox import EventBuffer
from headrace.engine.policy_control import PolicyControl
from headrace.errors import (
    EngineFailed,
    InvalidRequest,
    RemoteError,
    RequestError,
    Unavailable,
)
from headrace.types import (
    Abort,
    Accepted,
    EngineStats,
    Failed,
    FromEngine,
    GenerationRequest,
    ModelCard,
    PolicyPrepared,
    PolicyReport,
    Pong,
    Progress,
    Ready,
    Refused,
    StepEvents,
    Submit,
    ToEngine,
    TokenEvent,
)

ClientState = Literal["starting", "ready", "failed", "stopped"]
EventStream = AsyncIterator[list[TokenEvent]]

SLICE_EVENTS = 32
"""News that is handed on between two looks at the sockets."""
_RETRY_AFTER_STARTING_SECONDS = 2.0


class RequestStream:
    """The events of one request, for one consumer: an async iterator of lists of joined events."""

    def __init__(self, request: GenerationRequest) -> None:
        """Of a request that is wanted whole, the consumer is woken by the first and the last news only."""
        self.request_id = request.request_id
        self._is_whole = request.is_whole
        self._was_taken = False
        self.accepted = False
        self._open_choices = set(range(request.sampling.n))
        self._events = EventBuffer()
        self._error: RequestError | None = None
        self._reader: asyncio.Future[None] | None = None
        """What the consumer waits on; None while it does not wait."""

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to say about the request."""
        return self._error is not None or not self._open_choices

    def accept(self) -> None:
        self.accepted = True
        self._wake()

    def add(self, event: TokenEvent) -> None:
        if not self.accepted or event.index not in self._open_choices:
            return  # of an aborted request with the same id
        self._events.add(event)
        if event.finish_reason is not None:
            self._open_choices.discard(event.index)
        if self._may_take:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after the events that have already arrived."""
        if not self.is_over:
            self._error = error
            self._wake()

    async def wait_accepted(self) -> None:
        """Wait for the engine's answer. Raises the refusal."""
        while not self.accepted:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._may_take:
            if self._error is not None:
                raise self._error
            if not self._open_choices:
                raise StopAsyncIteration
            await self._wait()
        self._was_taken = True
        return self._events.take()

    @property
    def _may_take(self) -> bool:
        waits_for_end = self._is_whole and self._was_taken and not self.is_over
        return bool(self._events) and not waits_for_end


class _RunningStream:
    """One stream from its submission to its end; a context manager because leaving it early aborts."""

    __slots__ = ("_request", "_send", "_stream", "_streams")

    def __init__(
        self,
        streams: dict[str, RequestStream],
        request: GenerationRequest,
        send: Callable[[Submit | Abort], None],
    ) -> None:
        self._streams = streams
        self._request = request
        self._send = send
        self._stream = RequestStream(request)

    async def __aenter__(self) -> EventStream:
        request_id = self._request.request_id
        if request_id in self._streams:
            raise InvalidRequest(f"a request with the id {request_id!r} is already running")
        self._send(Submit(self._request))
        self._streams[request_id] = self._stream
        try:
            await self._stream.wait_accepted()
        except BaseException:
            self._leave()
            raise
        return self._stream

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        request_id = self._request.request_id
        del self._streams[request_id]
        if not self._stream.is_over:
            self._send(Abort(request_id))


class StreamMultiplexer:
    """The live streams of one client, and its engine's statistics across restarts of the engine."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._told = EngineStats()  # by the engine that runs now
        self._carried = EngineStats()  # what those before it counted

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def stats(self) -> EngineStats:
        """Gauges of now; counters since the client was made, whatever engines died meanwhile."""
        told, carried = self._told, self._carried
        totals = {name: getattr(carried, name) + getattr(told, name) for name in _COUNTERS}
        return msgspec.structs.replace(told, **totals)

    def stream(
        self,
        request: GenerationRequest,
        send: Callable[[Submit | Abort], None],
    ) -> AbstractAsyncContextManager[EventStream]:
        """Submit a request and wait until it is accepted. Leaving before its end sends Abort."""
        return _RunningStream(self._streams, request, send)

    def receive(self, frame: Accepted | Refused | StepEvents) -> None:
        """Hand an engine's frame to the streams it concerns. Unknown ids are of streams left early."""
        if isinstance(frame, StepEvents):
            self._told = frame.stats
            for event in frame.events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.add(event)
            return
        stream = self._streams.get(frame.request_id)
        if stream is None:
            return
        if isinstance(frame, Accepted):
            stream.accept()
        else:
            stream.fail(RemoteError(frame.error))

    def fail_all(self, error: Callable[[], RequestError]) -> None:
        """End every stream: the engine is gone. What it counted is kept, its gauges fall to 0."""
        for stream in self._streams.values():
            stream.fail(error())
        stats = self.stats
        self._carried = EngineStats(**{name: getattr(stats, name) for name in _COUNTERS})
        self._told = EngineStats()


def slices(frame: FromEngine) -> Iterator[FromEngine]:
    """Yield a frame, or the frames of so much news each that waking its readers takes little time.

    All readers that are woken at once run before the event loop looks at its sockets again.
    """
    if not isinstance(frame, StepEvents) or len(frame.events) <= SLICE_EVENTS:
        yield frame
        return
    for start in range(0, len(frame.events), SLICE_EVENTS):
        events = frame.events[start : start + SLICE_EVENTS]
        yield msgspec.structs.replace(frame, events=events)


_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))


class StreamingClient:
    """What both kinds share: the state that frames change, and the streams."""

    def __init__(self, client_id: str) -> None:
        self._id = client_id
        self._state: ClientState = "starting"
        self._progress = Progress("start", 0.0)
        self._card: ModelCard | None = None
        self._failure: str | None = None
        self._restarts_total = 0
        self._streams = StreamMultiplexer()
        self.policies = PolicyControl(client_id, self._send)
        self._settled = asyncio.Event()
        self._log = structlog.get_logger("headrace.engine").bind(replica=client_id)

    @property
    def id(self) -> str:
        return self._id

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def card(self) -> ModelCard | None:
        return self._card

    @property
    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def restarts_total(self) -> int:
        return self._restarts_total

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[EventStream]:
        return self._streams.stream(request, self._try_send_ready)

    def _send(self, frame: ToEngine) -> None:
        raise NotImplementedError

    def _try_send_ready(self, frame: Submit | Abort) -> None:
        if self._state != "ready" and isinstance(frame, Submit):
            raise self._unavailable()
        try:
            self._send(frame)
        except (UnicodeEncodeError, OverflowError) as error:
            raise InvalidRequest(
                f"the request holds a value that cannot be sent: {error}"
            ) from error

    def _receive(self, frame: FromEngine) -> None:
        if isinstance(frame, Progress):
            self._progress = frame
        elif isinstance(frame, Ready):
            self._card = frame.card
            self._failure = None
            self._set_state("ready")
            self.policies.ready()
        elif isinstance(frame, Failed):
            self._failure = frame.message
        elif isinstance(frame, PolicyPrepared | PolicyReport):
            self.policies.receive(frame)
        elif not isinstance(frame, Pong):
            self._streams.receive(frame)

    def _set_state(self, state: ClientState) -> None:
        if self._state == "stopped":
            return
        self._state = state
        if state == "starting":
            self._progress = Progress("start", 0.0)
        else:
            self._settled.set()

    async def _wait_settled(self) -> None:
        await self._settled.wait()
        if self._state in ("failed", "stopped"):
            raise EngineFailed(
                self._failure or f"the engine of replica '{self._id}' was stopped while starting"
            )

    def _unavailable(self) -> Unavailable:
        name = f"the engine of replica '{self._id}'"
        if self._state == "starting":
            stage = f"{self._progress.stage}, {self._progress.fraction:.0%}"
            return Unavailable(
                f"{name} is starting ({stage})", retry_after_seconds=_RETRY_AFTER_STARTING_SECONDS
            )
        return Unavailable(f"{name} has {self._state}; the server's log has the details")

    def _stop_streams(self) -> None:
        self._set_state("stopped")
        self._streams.fail_all(lambda: Unavailable("the server is stopping"))
