"""The load generator counts what failed apart, however a stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.load import Lengths, LoadPlan, LoadReport, run_load

LAST = json.dumps({"choices": [{"text": "", "finish_reason": "length"}]})
BROKEN = json.dumps({"choices": [{"text": "", "finish_reason": "error"}]})
TEXT = json.dumps({"choices": [{"text": "a"}]})
USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
FLAT_ERROR = json.dumps({"object": "error", "message": "too long"})
ERROR = json.dumps({"error": {"message": "the engine died", "code": "engine_failed"}})


@contextlib.asynccontextmanager
async def server(
    events: list[str], *, whole: bool, status: int = 200, bodies: list[Any] | None = None
) -> AsyncIterator[str]:
    """Serve one streamed answer to everybody; without `whole` the connection ends inside the body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        if bodies is not None:
            bodies.append((head.split()[1].decode(), body))
        writer.write(
            f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
            "content-type: text/event-stream\r\n\r\n".encode()
        )
        for event in events:
            half = len(event) // 2
            for part in (f"data: {event[:half]}".encode(), f"{event[half:]}\n\n".encode()):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        if whole:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def load(
    events: list[str],
    *,
    whole: bool = True,
    status: int = 200,
    bodies: list[Any] | None = None,
    **plan: Any,
) -> LoadReport:
    async def main() -> LoadReport:
        async with server(events, whole=whole, status=status, bodies=bodies) as url:
            asked = LoadPlan(**{"url": url, "num_requests": 3, "concurrency": 2, **plan})
            return await run_load(asked)

    return asyncio.run(main())


def test_a_stream_that_ends_well_is_measured() -> None:
    report = load([TEXT, TEXT, LAST, USAGE, "[DONE]"])
    assert report.errors == [] and len(report.succeeded) == 3
    assert [outcome.output_tokens for outcome in report.outcomes] == [2] * 3
    for outcome in report.outcomes:
        assert outcome.ttft_seconds and outcome.e2e_seconds and outcome.tpot_seconds is not None
        assert len(outcome.itl_seconds) == 1
        assert outcome.tpot_seconds == outcome.e2e_seconds - outcome.ttft_seconds
        assert outcome.late_seconds < outcome.ttft_seconds


def test_a_chat_is_asked_for_and_its_first_text_is_the_first_token() -> None:
    """The event that only says the role is no token."""
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    text = json.dumps({"choices": [{"delta": {"content": "a"}}]})
    thought = json.dumps({"choices": [{"delta": {"reasoning_content": "b"}}]})
    end = json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]})
    bodies: list[Any] = []
    report = load([role, thought, text, end, "[DONE]"], bodies=bodies, endpoint="chat", model="m")
    assert report.errors == []
    assert [outcome.output_tokens for outcome in report.outcomes] == [2] * 3  # no usage: by events
    path, body = bodies[0]
    assert path == "/v1/chat/completions" and body["model"] == "m"
    assert body["messages"][0]["role"] == "user" and body["stream_options"]["include_usage"]


def test_prompts_go_out_as_token_ids_where_the_plan_has_them() -> None:
    bodies: list[Any] = []
    load([TEXT, LAST, "[DONE]"], bodies=bodies, prompt_ids=[[1, 2], [3]], concurrency=1)
    assert [body["prompt"] for _, body in bodies] == [[1, 2], [3], [1, 2]]


def test_an_address_may_end_with_v1() -> None:
    bodies: list[Any] = []

    async def main() -> LoadReport:
        async with server([TEXT, LAST, "[DONE]"], whole=True, bodies=bodies) as url:
            return await run_load(LoadPlan(url=f"{url}/v1/", num_requests=1))

    assert asyncio.run(main()).errors == []
    assert bodies[0][0] == "/v1/completions"


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """A client held back by its own limit adds to the latency; it does not hide that the server is slow."""
    plan: dict[str, Any] = {"request_rate": 1e6, "max_concurrency": 1, "num_requests": 6}
    report = load([TEXT, LAST, "[DONE]"], output_tokens=Lengths.fixed(1), **plan)
    late = [outcome.late_seconds for outcome in report.outcomes]
    assert report.errors == [] and late == sorted(late)
    first, last = report.outcomes[0], report.outcomes[-1]
    assert first.e2e_seconds is not None and last.ttft_seconds is not None
    assert last.late_seconds > 4 * min(
        o.e2e_seconds - o.late_seconds for o in report.outcomes if o.e2e_seconds
    )
    assert last.ttft_seconds > last.late_seconds


@pytest.mark.parametrize(
    ("events", "whole", "status", "reason"),
    [
        ([TEXT, TEXT, TEXT, ERROR], True, 200, "the engine died"),
        ([ERROR], True, 200, "the engine died"),
        ([TEXT, FLAT_ERROR, "[DONE]"], True, 200, "too long"),
        ([TEXT, TEXT, LAST], False, 200, "ended before the answer did"),
        ([TEXT, TEXT, LAST], True, 200, r"without \[DONE\]"),
        ([TEXT, TEXT, "[DONE]"], True, 200, "without a finish_reason"),
        ([TEXT, BROKEN, "[DONE]"], True, 200, "finish_reason 'error'"),
        ([LAST, USAGE, "[DONE]"], True, 200, "without any text"),
        ([TEXT, "{broken"], True, 200, "DecodeError"),
        ([TEXT, "[1]"], True, 200, "Expected `object`, got `array`"),
        ([TEXT, '{"choices": 5}'], True, 200, r"got `int` - at `\$.choices`"),
        ([TEXT, '{"choices": [], "usage": 7}'], True, 200, r"got `int` - at `\$.usage`"),
        ([], True, 503, "HTTP 503"),
    ],
    ids=[
        "error event",
        "error at once",
        "flat error",
        "cut off",
        "no [DONE]",
        "no finish reason",
        "ended as an error",
        "no text",
        "broken event",
        "no object",
        "no choices",
        "no usage",
        "refused",
    ],
)
def test_a_failure_is_no_success_and_gives_no_time(
    events: list[str], whole: bool, status: int, reason: str
) -> None:
    """S12: a stream that breaks after its headers is a failure, and no latency comes of it."""
    report = load(events, whole=whole, status=status)
    assert report.succeeded == [] and len(report.errors) == 3
    for error in report.errors:
        assert re.search(reason, error), error
    assert report.percentile("ttft", 0.5) is None
    assert report.output_tokens_per_second == 0


def test_a_server_that_is_not_there_fails_every_request() -> None:
    report = asyncio.run(run_load(LoadPlan(url="http://127.0.0.1:1", num_requests=2)))
    assert len(report.errors) == 2 and "127.0.0.1" in report.errors[0]
