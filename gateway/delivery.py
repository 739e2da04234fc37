"""Where the news of a call goes: into one answer at the end, or to the client as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from starlette.types import Send

from headrace.errors import EngineFailed, RemoteError, RequestAborted, RequestError
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.answer import ENDED_WELL, Answer
from headrace.gateway.errors import error_info, error_object
from headrace.gateway.failover import is_replicas_fault
from headrace.gateway.sse import SseWriter
from headrace.types import TokenEvent

_logger = structlog.get_logger("headrace.gateway")


@dataclass(slots=True)
class Outlet:
    """The way to the client. A `writer` is there where the answer is streamed."""

    send: Send
    writer: SseWriter | None = None
    has_said: bool = False
    """Whether some of the answer has gone out: then nothing can begin anew."""
    stalled: BaseException | None = None
    """Why the client was given up, where it was."""
    _task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    _watch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Send the head of a stream, where it has not gone out yet, and watch the client from then on."""
        if self.writer is not None and not self.writer.started:
            self._watch = asyncio.get_running_loop().create_task(self.writer.watch())
            self._watch.add_done_callback(self._give_up)
            await self.writer.start()

    def close(self) -> None:
        """End the watch."""
        self._task = None
        if self._watch is not None:
            self._watch.cancel()

    def _give_up(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        error = watch.exception()
        if error is not None and self._task is not None:
            self.stalled = error
            self._task.cancel()


Way = Callable[[Outlet], Awaitable[bytes]]
"""One way to have a call answered; returns the last bytes of a stream's body."""


async def deliver(
    record: RequestRecord, send: Send, ways: Sequence[Way], *, is_stream: bool
) -> None:
    """Have a call answered, by the next way where one fails before anything of it went out.

    A stream that fails later ends with one error event; everything else is raised.
    """
    if not is_stream:
        await _in_turn(ways, Outlet(send))
        return
    config = record.state.config.gateway
    writer = SseWriter(
        send, keepalive_interval=config.keepalive_interval, stall_timeout=config.stall_timeout
    )
    outlet, task = Outlet(send, writer), asyncio.current_task()
    try:
        last = await _in_turn(ways, outlet)
    except asyncio.CancelledError:
        if outlet.stalled is None or task is None or task.uncancel():
            raise
        raise outlet.stalled from None
    except Exception as error:
        outlet.close()
        if not writer.started or isinstance(error, RequestAborted):
            raise
        note_failure(record, error)
        await writer.end([msgspec.json.encode(error_object(error_info(error)))])
        return
    finally:
        outlet.close()
    if writer.started:
        await writer.end_with(last)


async def _in_turn(ways: Sequence[Way], outlet: Outlet) -> bytes:
    failure: RequestError | None = None
    for way in ways:
        try:
            return await way(outlet)
        except RequestError as error:
            if outlet.has_said or not is_replicas_fault(error):
                raise
            failure = failure or error
    assert failure is not None
    raise failure


@dataclass(slots=True)
class WholeDelivery:
    """Collects everything. Until the end nothing has gone out, so any prompt may begin anew."""

    record: RequestRecord
    answer: Answer

    async def accepted(self) -> None:
        """Nothing goes out yet."""

    async def take(self, prompt_index: int, events: list[TokenEvent]) -> None:
        self.record.take(prompt_index, events)
        check_failed(events)
        self.answer.collect(prompt_index, events)

    def restart(self, prompt_index: int) -> bool:
        self.record.restart(prompt_index)
        self.answer.restart(prompt_index)
        return True


@dataclass(slots=True)
class StreamDelivery:
    """Writes every piece of news at once; a prompt of which something was said cannot begin anew."""

    record: RequestRecord
    answer: Answer
    outlet: Outlet
    writer: SseWriter
    _said: set[int] = field(default_factory=set)

    async def accepted(self) -> None:
        await self.outlet.begin()

    async def take(self, prompt_index: int, events: list[TokenEvent]) -> None:
        self.record.take(prompt_index, events)
        chunks = self.answer.chunks(prompt_index, events)
        if chunks:
            self._said.add(prompt_index)
            self.outlet.has_said = True
            await self.writer.send(chunks)
        check_failed(events)

    def restart(self, prompt_index: int) -> bool:
        if prompt_index in self._said:
            return False
        self.record.restart(prompt_index)
        return True


def check_failed(events: Sequence[TokenEvent]) -> None:
    """Raise where a choice did not end well, because then the call has failed."""
    for event in events:
        if event.error is not None:
            raise RemoteError(event.error)
        if event.finish_reason is not None and event.finish_reason not in ENDED_WELL:
            raise EngineFailed(f"the engine ended the request early ({event.finish_reason})")


def note_failure(record: RequestRecord, error: Exception) -> None:
    """Note how a request failed; what was not on purpose goes to the log in full."""
    info = error_info(error)
    record.status, record.error_code = info.http_status, info.code
    if not isinstance(error, RequestError):
        _logger.error("request failed", request_id=record.request_id, exc_info=error)
