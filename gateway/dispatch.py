"""From a valid call to running streams: the model, the replica, the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from headrace.gateway.call import TargetModel
from headrace.gateway.readiness import require_card
from headrace.gateway.state import GatewayState
from headrace.gateway.tasks import first_error
from headrace.types import GenerationRequest, RoutingRequest, TokenEvent

TakeEvents = Callable[[int, list[TokenEvent]], Awaitable[None]]
"""(index of the prompt, its news)."""


async def find_target(state: GatewayState, model: str | None) -> TargetModel:
    """Return the model a body names (None: the only one), with its text side built."""
    card = require_card(state.router.resolve(model), state)
    return TargetModel(card, await state.texts.get(card))


async def run_requests(
    state: GatewayState,
    requests: Sequence[GenerationRequest],
    accepted: Callable[[], Awaitable[None]],
    take: TakeEvents,
) -> None:
    """Run the requests of one call side by side and hand their news to `take`.

    `accepted` runs once, when every engine has accepted and before any news. While `take` waits, the
    engines merge what comes next. One failure ends all: leaving a stream early aborts its request.
    """
    pending = len(requests)
    all_accepted = anyio.Event()

    async def run_one(index: int, request: GenerationRequest) -> None:
        nonlocal pending
        async with AsyncExitStack() as stack:
            events = await open_stream(state, request, stack)
            pending -= 1
            if pending == 0:
                await accepted()
                all_accepted.set()
            await all_accepted.wait()
            async for news in events:
                await take(index, news)

    if len(requests) == 1:
        await run_one(0, requests[0])
        return
    try:
        async with anyio.create_task_group() as group:
            for index, request in enumerate(requests):
                group.start_soon(run_one, index, request)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def open_stream(
    state: GatewayState, request: GenerationRequest, stack: AsyncExitStack
) -> AsyncIterator[list[TokenEvent]]:
    """Choose a replica and wait until its engine accepts. Leaving `stack` aborts what still runs."""
    routing = RoutingRequest(
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=len(request.prompt_token_ids),
        prefix_hashes=request.prefix_hashes,
    )
    replica = state.router.choose(routing, state.clock.now())
    stack.enter_context(state.router.ledger.hold(replica.id, num_tokens=routing.num_prompt_tokens))
    return await stack.enter_async_context(replica.client.stream(request))
