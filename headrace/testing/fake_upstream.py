"""Another server as an `http` replica sees it: raw HTTP, each answer as a test writes it, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

CHUNKED = "transfer-encoding: chunked"
SSE = "content-type: text/event-stream"
JSON = "content-type: application/json"


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def event(content: Any) -> bytes:
    """Return one SSE event."""
    data = content if isinstance(content, str) else json.dumps(content)
    return f"data: {data}\n\n".encode()


def delta(text: str, *, finish_reason: str | None = None, model: str = "far") -> bytes:
    """Return the event of one chat chunk."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "model": model, "choices": [choice]})


USAGE = event(
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
)
DONE = event("[DONE]")


def whole(text: str, *, model: str = "far") -> dict[str, Any]:
    """Return a chat completion."""
    return {
        "object": "chat.completion",
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }


def answers_json(content: Any, *, status: int = 200, headers: Sequence[str] = ()) -> Answer:
    """Return what answers every request with this JSON."""

    async def answer(received: Received, writer: asyncio.StreamWriter) -> None:
        raw = json.dumps(content).encode()
        lines = [f"HTTP/1.1 {status} X", JSON, f"content-length: {len(raw)}", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)

    return answer


def streams(*pieces: bytes | float, ends: bool = True) -> Answer:
    """Return what answers with these pieces, each a chunk of its own; a number is a pause in seconds.

    Without `ends` the connection breaks after them.
    """

    async def answer(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{SSE}\r\n{CHUNKED}\r\n\r\n".encode())
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
                await writer.drain()
        if ends:
            writer.write(b"0\r\n\r\n")
        else:
            await writer.drain()
            writer.close()

    return answer


async def breaks(received: Received, writer: asyncio.StreamWriter) -> None:
    """Hang up without an answer."""
    writer.close()


async def silent(received: Received, writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.sleep(3600)


@dataclass(slots=True)
class FakeUpstream:
    """A server on the loopback in this event loop; an async context manager.

    GET /v1/models answers as long as `is_healthy`; everything else is `answer`'s.
    """

    answer: Answer = field(default_factory=lambda: answers_json(whole("hi")))
    is_healthy: bool = True
    received: list[Received] = field(default_factory=list)
    """Every request but those for the models."""
    num_left: int = 0
    """Connections that the other side closed while an answer was under way."""
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeUpstream:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the port and every connection."""
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                while not writer.is_closing():
                    received = await _read(reader)
                    await self._answer(received, reader, writer)
            finally:
                writer.close()

    async def _answer(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if received.method == "GET":
            listing = {"object": "list", "data": [{"id": "far", "max_model_len": 99}]}
            status = 200 if self.is_healthy else 503
            await answers_json(listing, status=status)(received, writer)
            return
        self.received.append(received)
        answering = asyncio.ensure_future(self.answer(received, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            await answering
            return
        self.num_left += 1
        answering.cancel()
        raise ConnectionError


async def _read(reader: asyncio.StreamReader) -> Received:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, path, headers, body)
