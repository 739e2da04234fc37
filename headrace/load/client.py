"""Sends a plan's requests to a server and times what comes back.

Latencies count from the moment a request was due. In a closed loop that is when it is sent; in an open
loop a client that is late, or held back by `max_concurrency`, adds to the latency instead of hiding it.
A stream that carries an error, breaks off, or ends without a finish reason and [DONE] is a failure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from headrace.load.exchange import ExchangeFailed, Target, post
from headrace.load.plan import LoadPlan, PlannedRequest, plan_requests
from headrace.load.report import LoadReport, RequestOutcome

_SHOWN_BYTES = 200
"""Of the body of a refusal."""


async def run_load(
    plan: LoadPlan,
    report: Callable[[int], None] = lambda done: None,
    *,
    requests: Sequence[PlannedRequest] | None = None,
) -> LoadReport:
    """Send the plan's requests, or those given, and return the figures.

    `report` is told how many have finished.
    """
    requests = plan_requests(plan) if requests is None else requests
    outcomes = [RequestOutcome() for _ in requests]
    run = _Run(plan, requests, outcomes, report)
    await (run.closed_loop() if plan.request_rate is None else run.open_loop())
    wall = time.perf_counter() - run.start
    return LoadReport(plan, wall, outcomes, run.started_at)


class _Run:
    def __init__(
        self,
        plan: LoadPlan,
        requests: Sequence[PlannedRequest],
        outcomes: Sequence[RequestOutcome],
        report: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._requests = requests
        self._outcomes = outcomes
        self._report = report
        self._finished = 0
        self._bodies = [_body(plan, request) for request in requests]
        base = plan.url.rstrip("/").removesuffix("/v1")
        path = "chat/completions" if plan.endpoint == "chat" else "completions"
        headers = {"Content-Type": "application/json"}
        if plan.api_key:
            headers["Authorization"] = f"Bearer {plan.api_key}"
        self._target = Target.of(f"{base}/v1/{path}", headers)
        self.start, self.started_at = time.perf_counter(), time.monotonic()

    async def closed_loop(self) -> None:
        queue = iter(range(len(self._requests)))

        async def worker() -> None:
            for index in queue:
                await self._send(index, time.perf_counter())

        async with anyio.create_task_group() as group:
            for _ in range(min(self._plan.concurrency, len(self._requests))):
                group.start_soon(worker)

    async def open_loop(self) -> None:
        most = self._plan.max_concurrency or len(self._requests)
        gate = anyio.Semaphore(most)

        async def one(index: int, due: float) -> None:
            async with gate:
                await self._send(index, due)

        async with anyio.create_task_group() as group:
            for index, request in enumerate(self._requests):
                due = self.start + request.due_seconds
                await anyio.sleep(max(0.0, due - time.perf_counter()))
                group.start_soon(one, index, due)

    async def _send(self, index: int, due: float) -> None:
        outcome, stream = self._outcomes[index], _Stream()
        outcome.start_seconds = due - self.start
        outcome.late_seconds = time.perf_counter() - due
        try:
            status = await post(self._target, self._bodies[index], stream.take)
            if status != 200:
                stream.refuse(status)
        except (ExchangeFailed, TimeoutError, OSError, ValueError) as error:
            stream.error = stream.error or f"{type(error).__name__}: {error}"
        stream.settle(outcome, due)
        self._finished += 1
        self._report(self._finished)


def _body(plan: LoadPlan, request: PlannedRequest) -> bytes:
    body: dict[str, Any] = {
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    if plan.model is not None:
        body["model"] = plan.model
    return json.dumps(body).encode()


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        """Whether this brings something that the model generated."""
        if self.text:
            return True
        delta = self.delta
        if delta is None:
            return False
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _Stream:
    """The events of one response, as they arrive."""

    texts: list[float] = field(default_factory=list)
    """When each event with text arrived."""
    ended: float | None = None
    """When the finish reason arrived."""
    finish_reason: str | None = None
    usage: _Usage = field(default_factory=lambda: _Usage())
    is_done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def take(self, status: int, chunk: bytes) -> None:
        """Take bytes of an answer's body as they come. ValueError where an event is not what it should be."""
        if status == 200:
            self._feed(chunk, time.perf_counter())
            return
        self._rest = (self._rest + chunk)[:_SHOWN_BYTES]

    def refuse(self, status: int) -> None:
        """Say that the answer was a refusal, and what stood in it."""
        self.error = f"HTTP {status}: {self._rest.decode('utf-8', 'replace')}"

    def _feed(self, chunk: bytes, now: float) -> None:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = _DECODER.decode(data)
        if event.error or event.object == "error":
            said = event.error or event.message
            self.error = str(said.get("message", said) if isinstance(said, dict) else said)
            return
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            if choice.has_text():
                self.texts.append(now)
            if choice.finish_reason:
                self.finish_reason, self.ended = choice.finish_reason, now

    def settle(self, outcome: RequestOutcome, due: float) -> None:
        """Write what was seen into `outcome`: its times if all went well, else why not."""
        outcome.error = self.error or next(self._missing(), None)
        outcome.finish_reason = self.finish_reason
        outcome.prompt_tokens = self.usage.prompt_tokens or 0
        outcome.output_tokens = self.usage.completion_tokens or len(self.texts)
        details = self.usage.prompt_tokens_details
        outcome.cached_tokens = (details.cached_tokens if details else 0) or 0
        if outcome.error is not None or self.ended is None:
            return
        last = max(self.ended, self.texts[-1])
        outcome.ttft_seconds = self.texts[0] - due
        outcome.e2e_seconds = last - due
        outcome.itl_seconds = [b - a for a, b in zip(self.texts, self.texts[1:], strict=False)]
        if outcome.output_tokens > 1:
            outcome.tpot_seconds = (last - self.texts[0]) / (outcome.output_tokens - 1)

    def _missing(self) -> Iterator[str]:
        parts = (
            (self.texts, "any text"),
            (self.finish_reason, "a finish_reason"),
            (self.is_done, "[DONE]"),
        )
        for is_there, name in parts:
            if not is_there:
                yield f"the stream ended without {name}"
        if self.finish_reason == "error":
            yield "the server ended the answer with finish_reason 'error'"
