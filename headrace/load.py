"""A closed-loop load generator for any OpenAI-compatible server, and the figures it gives.

TTFT is first text minus send; TPOT is (end of text - first text) / (tokens - 1); failures, a stream
without [DONE] among them, are counted apart and never enter a latency. Tokens are the server's own
count (`usage`), so servers that put several tokens into one event are measured fairly.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import httpx
from httpx_aiohttp import AiohttpTransport

WORDS = (
    "river stone engine valley copper lantern meadow signal harbor winter paper bridge silver motor "
    "garden thunder window market forest candle ocean letter summer wheel"
).split()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send: `num_requests` completions, `concurrency` at a time."""

    url: str
    model: str | None = None
    concurrency: int = 1
    num_requests: int = 16
    prompt_tokens: int = 120
    output_tokens: int = 96
    shared_prefix_tokens: int = 0
    seed: int = 0
    api_key: str | None = None


@dataclass(slots=True)
class RequestOutcome:
    """One request: seconds from its start, or why it failed."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    duration_seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of one run."""

    plan: LoadPlan
    wall_seconds: float
    outcomes: Sequence[RequestOutcome] = field(repr=False)

    @property
    def succeeded(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    @property
    def output_tokens_per_second(self) -> float:
        return sum(outcome.output_tokens for outcome in self.succeeded) / self.wall_seconds

    @property
    def total_tokens_per_second(self) -> float:
        tokens = sum(outcome.output_tokens + outcome.prompt_tokens for outcome in self.succeeded)
        return tokens / self.wall_seconds

    def percentile(self, name: str, fraction: float) -> float | None:
        """Return the `fraction` quantile of a field over the successful requests; None without any."""
        values = [getattr(outcome, name) for outcome in self.succeeded]
        values = sorted(value for value in values if value is not None)
        if not values:
            return None
        if len(values) == 1:
            return float(values[0])
        cuts = statistics.quantiles(values, n=1000, method="inclusive")
        return float(cuts[min(998, max(0, round(fraction * 1000) - 1))])

    def as_dict(self) -> dict[str, float | int | str | None]:
        row: dict[str, float | int | str | None] = {
            "concurrency": self.plan.concurrency,
            "requests": len(self.outcomes),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "wall_seconds": self.wall_seconds,
            "output_tokens_per_second": self.output_tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
        }
        for name in ("ttft_seconds", "tpot_seconds", "duration_seconds"):
            for label, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                row[f"{name}_{label}"] = self.percentile(name, fraction)
        return row


def make_prompts(plan: LoadPlan) -> list[str]:
    """Return seeded prompts of about `prompt_tokens` common words (one token each in most vocabularies)."""
    rng = random.Random(plan.seed)
    shared = [rng.choice(WORDS) for _ in range(plan.shared_prefix_tokens)]
    own = max(0, plan.prompt_tokens - plan.shared_prefix_tokens)
    return [
        " ".join([*shared, *(rng.choice(WORDS) for _ in range(own))])
        for _ in range(plan.num_requests)
    ]


async def run_load(plan: LoadPlan, report: Callable[[int], None] = lambda done: None) -> LoadReport:
    """Send the plan's requests and return the figures. `report` is told how many have finished."""
    prompts = make_prompts(plan)
    outcomes = [RequestOutcome() for _ in prompts]
    # A connection a request: some servers end kept-alive ones while the next request is on its way.
    headers = {"Connection": "close"}
    if plan.api_key:
        headers["Authorization"] = f"Bearer {plan.api_key}"
    queue = iter(range(len(prompts)))
    finished = 0

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal finished
        for index in queue:
            await _send(client, plan, prompts[index], outcomes[index])
            finished += 1
            report(finished)

    async with httpx.AsyncClient(
        transport=AiohttpTransport(), timeout=600, headers=headers
    ) as client:
        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(plan.concurrency):
                group.start_soon(worker, client)
        wall = time.perf_counter() - start
    return LoadReport(plan=plan, wall_seconds=wall, outcomes=outcomes)


async def _send(
    client: httpx.AsyncClient, plan: LoadPlan, prompt: str, outcome: RequestOutcome
) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.model is not None:
        body["model"] = plan.model
    start = time.perf_counter()
    first = last = None
    is_done = False
    try:
        async with client.stream("POST", f"{plan.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                outcome.error = f"HTTP {response.status_code}: {text[:200]}"
                return
            async for line in response.aiter_lines():
                is_done = is_done or line.removeprefix("data:").strip() == "[DONE]"
                if _read_event(line, outcome):
                    last = time.perf_counter()
                    first = first or last
    except httpx.HTTPError as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    finally:
        outcome.duration_seconds = time.perf_counter() - start
    if outcome.error is None and not (first and is_done):
        missing = "[DONE]" if first else "any text"
        outcome.error = f"the stream ended without {missing}"
    if first is not None and last is not None:
        outcome.ttft_seconds = first - start
        if outcome.output_tokens > 1:
            outcome.tpot_seconds = (last - first) / (outcome.output_tokens - 1)


def _read_event(line: str, outcome: RequestOutcome) -> bool:
    """Note what an SSE line says; return whether it carried text."""
    if not line.startswith("data:"):
        return False
    data = line[5:].strip()
    if data == "[DONE]":
        return False
    event = json.loads(data)
    if event.get("error"):
        outcome.error = str(event["error"].get("message", event["error"]))
        return False
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens") or 0
    choices = event.get("choices") or []
    return bool(choices and choices[0].get("text"))
