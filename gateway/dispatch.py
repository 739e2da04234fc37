"""From a valid call to running streams: the model, the replica, the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from headrace.gateway.call import TargetModel
from headrace.gateway.failover import with_failover
from headrace.gateway.readiness import require_card
from headrace.gateway.replica import Replica
from headrace.gateway.state import GatewayState
from headrace.gateway.tasks import first_error
from headrace.gateway.upstream import Upstream
from headrace.types import GenerationRequest, RoutingRequest, TokenEvent


class Sink(Protocol):
    """Takes the news of one call's prompts."""

    async def accepted(self) -> None:
        """Every prompt has an engine that accepted it. Once, before any news."""
        ...

    async def take(self, prompt_index: int, events: list[TokenEvent]) -> None:
        """News of one prompt. While this waits, the engine merges what comes next."""
        ...

    def restart(self, prompt_index: int) -> bool:
        """Forget what a prompt has said, for it begins anew; False where some of it has gone out."""
        ...


async def find_target(state: GatewayState, model: str | None) -> TargetModel:
    """Return the model a body names (None: the only one), with its text side built."""
    card = require_card(state.router.resolve(model), state)
    return TargetModel(card, await state.texts.get(card))


async def run_requests(
    state: GatewayState, requests: Sequence[GenerationRequest], sink: Sink
) -> None:
    """Run the requests of one call side by side, each on an engine that the router chooses.

    A request whose replica fails moves to another one while nothing of it has gone out; any other
    failure ends all. Leaving a stream early aborts its request.
    """
    pending = set(range(len(requests)))
    all_accepted = anyio.Event()

    async def run_one(index: int, request: GenerationRequest) -> None:
        async def on(replica: Replica) -> None:
            assert not isinstance(replica.client, Upstream)
            async with replica.client.stream(request) as events:
                if index in pending:
                    pending.discard(index)
                    if not pending:
                        await sink.accepted()
                        all_accepted.set()
                await all_accepted.wait()
                async for news in events:
                    await sink.take(index, news)

        await with_failover(
            state,
            routing_request(request),
            on,
            lambda: sink.restart(index),
            excluding=_elsewhere(state, request.model),
        )

    if len(requests) == 1:
        await run_one(0, requests[0])
        return
    try:
        async with anyio.create_task_group() as group:
            for index, request in enumerate(requests):
                group.start_soon(run_one, index, request)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def routing_request(request: GenerationRequest) -> RoutingRequest:
    """Return what the routing policy may know of a request."""
    return RoutingRequest(
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=len(request.prompt_token_ids),
        prefix_hashes=request.prefix_hashes,
    )


def _elsewhere(state: GatewayState, model: str) -> list[str]:
    """Return the replicas of a model that take text, not tokens."""
    group = state.router.resolve(model)
    return [replica.id for replica in group.replicas if replica.upstream is not None]
