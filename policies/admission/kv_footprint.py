"""KV footprint: a request comes in when the KV blocks it can need are free on the replica proposed for it.

It can need its prompt, less what that replica has of it, and the output that its tenant's requests usually
stay below. A call with several prompts comes in when there is room for each where it is proposed to go.
Reserved blocks are given back when the request ends, so what was let in is never short of
memory because of what came later. Who finds no room queues: urgent requests (priority below 0) before
standard ones, those before batch (above 0), first come first served within a class. The queue is bounded
in requests, in tokens and in time, and who would wait longer than that is told so at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headrace.types import (
    AdmissionView,
    Admit,
    Charge,
    PromptView,
    Queue,
    Reject,
    ReplicaView,
    TicketView,
)
from headrace.types.units import Bounds, Unit

_CLASSES = ("urgent", "standard", "batch")
_BATCH_SHARE = 0.5
"""Of the queue, so that batch work never keeps others from waiting."""


class KVFootprint:
    name: ClassVar[str] = "kv_footprint"

    @dataclass(frozen=True, slots=True)
    class Options:
        """How full a pool may be planned, and how long a queue may grow."""

        max_wait: Annotated[float, Unit("duration"), Bounds(0.001, None)] = 30.0
        max_queued_requests: Annotated[int, Bounds(0, None)] = 256
        """Each choice counts."""
        max_queued_tokens: Annotated[int, Bounds(0, None)] = 1 << 18
        """Prompt tokens and the output tokens expected."""
        pool_share: Annotated[float, Bounds(0.05, 4)] = 1.0
        """Of a replica's blocks; above 1 trusts that not all requests need what they can need."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        options = self._options
        if ticket.stage == "arrival":
            is_full = (
                view.queued_requests > 0 and view.queued_requests >= options.max_queued_requests
            )
            return self._queue_full(view) if is_full else Admit()
        charges, there_is_room = self._charges(ticket, view)
        if not charges:
            return Admit()
        rank = (ticket.priority >= 0) + (ticket.priority > 0)
        lane = f"{ticket.model}/{_CLASSES[rank]}"
        waits_already = ticket.lane == lane
        before = {f"{ticket.model}/{name}" for name in _CLASSES[: rank + 1]}
        ahead = [
            each
            for each in view.lanes
            if each.name in before and not (waits_already and each.name == lane)
        ]
        if not ahead and there_is_room:
            return Admit(charges)
        if waits_already:
            return Queue(lane, now + options.max_wait)
        tokens = ticket.num_prompt_tokens + ticket.expected_output_tokens
        share = _BATCH_SHARE if rank == len(_CLASSES) - 1 else 1.0
        if (
            view.queued_requests + ticket.num_choices > options.max_queued_requests * share
            or view.queued_tokens + tokens > options.max_queued_tokens * share
        ):
            return self._queue_full(view)
        if view.tokens_per_second:
            wait = (sum(each.num_tokens for each in ahead) + tokens) / view.tokens_per_second
            if wait > options.max_wait:
                return self._too_long(wait)
        return Queue(lane, now + options.max_wait)

    def _charges(self, ticket: TicketView, view: AdmissionView) -> tuple[tuple[Charge, ...], bool]:
        """Return the blocks of each prompt that goes to a replica with a known pool, and whether all are free.

        Who needs more than a pool needs all of it.
        """
        pools = {each.id: each for each in view.replicas if each.num_blocks}
        needed: dict[str, int] = {}
        charges: list[Charge] = []
        there_is_room = True
        prompts: Sequence[PromptView | TicketView] = ticket.prompts or (ticket,)
        for index, prompt in enumerate(prompts):
            pool = pools.get(prompt.replica_id)
            if pool is None:
                continue
            capacity = max(1, int(pool.num_blocks * self._options.pool_share))
            before = needed.get(pool.id, 0)
            amount = min(needed_blocks(prompt, pool), capacity - before)
            needed[pool.id] = before + amount
            there_is_room &= pool.reserved_blocks + needed[pool.id] <= capacity
            charges.append(
                Charge(
                    f"kv/{pool.id}",
                    amount,
                    capacity,
                    unit="blocks",
                    replica_id=pool.id,
                    prompt_index=index,
                )
            )
        return tuple(charges), there_is_room

    def _queue_full(self, view: AdmissionView) -> Reject:
        options = self._options
        return Reject(
            "server",
            _retry_after(view.predicted_wait_seconds),
            f"the server is overloaded: {view.queued_requests} requests with {view.queued_tokens} "
            f"tokens wait already, at most {options.max_queued_requests} with "
            f"{options.max_queued_tokens} may, and batch work half of that; wait and send again",
            code="queue_full",
        )

    def _too_long(self, wait: float) -> Reject:
        return Reject(
            "server",
            _retry_after(wait - self._options.max_wait),
            f"the server is overloaded: the request would wait about {wait:.0f} s, at most "
            f"{self._options.max_wait:g} s are allowed; wait and send again",
            code="predicted_wait",
        )


def needed_blocks(prompt: PromptView | TicketView, replica: ReplicaView) -> int:
    """Return the KV blocks that a prompt can fill beyond what the replica holds of it.

    Each choice after the first has its own last block.
    """
    rows = prompt.num_prompt_tokens - prompt.cached_tokens + prompt.expected_output_tokens
    return max(1, math.ceil(rows / replica.block_size)) + prompt.num_choices - 1


def _retry_after(seconds: float) -> float:
    return min(max(seconds, 1.0), 600.0)
