"""Where the news of a call goes: into one answer at the end, or to the client as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anyio.abc import TaskGroup

from headrace.errors import EngineFailed, RemoteError
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.answer import ENDED_WELL, Answer
from headrace.gateway.sse import SseWriter
from headrace.types import TokenEvent


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
    writer: SseWriter
    group: TaskGroup
    _said: set[int] = field(default_factory=set)

    async def accepted(self) -> None:
        self.group.start_soon(self.writer.watch)
        await self.writer.start()

    async def take(self, prompt_index: int, events: list[TokenEvent]) -> None:
        self.record.take(prompt_index, events)
        chunks = self.answer.chunks(prompt_index, events)
        if chunks:
            self._said.add(prompt_index)
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
