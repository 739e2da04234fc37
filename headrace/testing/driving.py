"""Driving an engine client in a test: bounded in time, closed whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from headrace.engine.client import EngineClient
from headrace.types import GenerationRequest, SamplingParams, TokenEvent

ClientT = TypeVar("ClientT", bound=EngineClient)


def run_bounded(main: Coroutine[Any, Any, None], seconds: float = 60) -> None:
    """Run a coroutine in a new event loop. TimeoutError where it takes longer."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main

    asyncio.run(bounded())


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until a condition holds. TimeoutError where it does not."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def started(client: ClientT) -> AsyncIterator[ClientT]:
    """Start a client, yield it once it is ready, close it."""
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request: GenerationRequest) -> list[TokenEvent]:
    """Run a request to its end and return all its events."""
    async with client.stream(request) as events:
        return [event async for some in events for event in some]


def plain_request(
    name: str = "r", *, token: int = 1, max_tokens: int = 3, n: int = 1, salt: str = ""
) -> GenerationRequest:
    """Return a request for `max_tokens` greedy tokens after a prompt of one token."""
    return GenerationRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[token],
        sampling=SamplingParams(max_tokens=max_tokens, n=n, temperature=0, ignore_eos=True),
        cache_salt=salt,
    )
