"""The load generator counts what failed apart, however a stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

import pytest

from headrace.load import LoadPlan, LoadReport, run_load

TEXT = json.dumps({"choices": [{"text": "a"}]})
USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
ERROR = json.dumps({"error": {"message": "the engine died", "code": "engine_failed"}})


@contextlib.asynccontextmanager
async def server(events: list[str], *, whole: bool, status: int = 200) -> AsyncIterator[str]:
    """Serve one streamed answer to everybody; without `whole` the connection ends inside the body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(
            f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
            "content-type: text/event-stream\r\n\r\n".encode()
        )
        for event in events:
            body = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(body), body))
        if whole:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def load(events: list[str], *, whole: bool = True, status: int = 200) -> LoadReport:
    async def main() -> LoadReport:
        async with server(events, whole=whole, status=status) as url:
            return await run_load(LoadPlan(url=url, num_requests=3, concurrency=2))

    return asyncio.run(main())


def test_a_stream_that_ends_well_is_measured() -> None:
    report = load([TEXT, TEXT, USAGE, "[DONE]"])
    assert report.errors == [] and len(report.succeeded) == 3
    assert [outcome.output_tokens for outcome in report.outcomes] == [2] * 3
    assert report.percentile("ttft_seconds", 0.5) is not None


@pytest.mark.parametrize(
    ("events", "whole", "status", "reason"),
    [
        ([TEXT, TEXT, TEXT, ERROR], True, 200, "the engine died"),
        ([ERROR], True, 200, "the engine died"),
        ([TEXT, TEXT], False, 200, "Error"),
        ([TEXT, TEXT], True, 200, r"without \[DONE\]"),
        ([USAGE, "[DONE]"], True, 200, "without any text"),
        ([], True, 503, "HTTP 503"),
    ],
    ids=["error event", "error at once", "cut off", "no [DONE]", "no text", "refused"],
)
def test_a_failure_is_no_success_and_gives_no_time(
    events: list[str], whole: bool, status: int, reason: str
) -> None:
    """S12: a stream that breaks after its headers is a failure, and no latency comes of it."""
    report = load(events, whole=whole, status=status)
    assert report.succeeded == [] and len(report.errors) == 3
    for error in report.errors:
        assert re.search(reason, error), error
    assert report.percentile("ttft_seconds", 0.5) is None
    assert report.output_tokens_per_second == 0
