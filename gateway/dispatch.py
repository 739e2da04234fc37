"""From a valid call to running streams: the model, the replica, the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import anyio

from headrace.gateway.admission import Ticket
from headrace.gateway.call import TargetModel
from headrace.gateway.entrance import Placement
from headrace.gateway.failover import with_failover
from headrace.gateway.ledger import Hold
from headrace.gateway.readiness import require_card
from headrace.gateway.replica import Replica
from headrace.gateway.state import GatewayState
from headrace.gateway.tasks import first_error
from headrace.types import TokenEvent

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient


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
    state: GatewayState, ticket: Ticket, placements: Sequence[Placement], sink: Sink
) -> None:
    """Run the prompts of one call side by side, each on an engine that the router chooses.

    A prompt whose replica fails moves to another one while nothing of it has gone out; any other
    failure ends all. Leaving a stream early aborts its request. The KV blocks that the ticket holds for a
    prompt go with it.
    """
    pending = set(range(len(placements)))
    all_accepted = asyncio.Event()

    async def run_one(index: int, placement: Placement) -> None:
        async def on(replica: Replica, hold: Hold) -> None:
            assert replica.upstream is None
            ticket.move(replica.id, index)
            client = cast("EngineClient", replica.client)
            async with client.stream(placement.request) as events:
                if index in pending:
                    pending.discard(index)
                    if not pending:
                        await sink.accepted()
                        all_accepted.set()
                if pending:
                    await all_accepted.wait()
                async for news in events:
                    hold.prefilled()
                    await sink.take(index, news)

        await with_failover(
            state,
            placement.routing,
            on,
            lambda: sink.restart(index),
            excluding=_elsewhere(state, placement.request.model),
            proposed=placement.replica_id,
        )

    if len(placements) == 1:
        await run_one(0, placements[0])
        return
    try:
        async with anyio.create_task_group() as group:
            for index, placement in enumerate(placements):
                group.start_soon(run_one, index, placement)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def _elsewhere(state: GatewayState, model: str) -> list[str]:
    """Return the replicas of a model that take text, not tokens."""
    group = state.router.resolve(model)
    return [replica.id for replica in group.replicas if replica.upstream is not None]
