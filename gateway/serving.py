"""One call whose body is read: on an engine here, by another server, or whichever routing chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Send

from headrace.errors import InvalidRequest
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.admission import Ticket
from headrace.gateway.answer import Answer
from headrace.gateway.call import Call, Caller
from headrace.gateway.delivery import Outlet, StreamDelivery, WholeDelivery, deliver
from headrace.gateway.dispatch import run_requests
from headrace.gateway.entrance import (
    Placement,
    admit_call,
    expected_load,
    parsed_view,
    pass_gate,
)
from headrace.gateway.errors import send_json
from headrace.gateway.failover import with_failover
from headrace.gateway.json_body import decode_body
from headrace.gateway.ledger import Hold
from headrace.gateway.relay import Relay
from headrace.gateway.relay_body import RelayedBody
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup
from headrace.gateway.sse import DONE, event_bytes
from headrace.gateway.state import GatewayState
from headrace.gateway.text_prefix import canonical_prompt, estimated_tokens, text_prefix_hashes
from headrace.types import RoutingRequest, TicketView

_UNBOUNDED_TOKENS = 1 << 20
"""Where a caller sets no bound and only the other server knows one."""
_BODY = msgspec.json.Decoder(dict[str, Any])
_INLINE_BYTES = 8 << 10
"""Shorter bodies are hashed at once: a thread would cost more."""


@dataclass(slots=True)
class Serving:
    """One request between its body and its answer."""

    state: GatewayState
    record: RequestRecord
    ticket: Ticket
    arrival: TicketView
    caller: Caller
    headers: Mapping[str, str]
    """What another server is told of the request's head."""
    send: Send

    async def here(self, call: Call, relayed: RelayedBody | None) -> None:
        """Serve a call whose tokens are known. `relayed` is given where other servers may serve it too."""
        placements = await admit_call(self.state, self.ticket, self.arrival, call)
        lengths = [len(request.prompt_token_ids) for request in call.requests]
        self.record.begin(call.card.name, lengths, call.num_choices)

        async def on_engines(outlet: Outlet) -> bytes:
            return await self._on_engines(call, placements, outlet)

        ways = [on_engines]
        if relayed is not None:
            first = placements[0]
            chosen = first.replica_id or self._choose(first.routing)

            async def elsewhere(outlet: Outlet) -> bytes:
                return await self._relay(relayed, first.routing, chosen, outlet)

            ways.append(elsewhere)
            replica = self.state.router.find(chosen)
            if replica is not None and replica.upstream is not None:
                ways.reverse()
        await deliver(self.record, self.send, ways, is_stream=call.stream)

    async def elsewhere(self, relayed: RelayedBody, group: ModelGroup) -> None:
        """Serve a call whose tokens only other servers know."""
        self.caller.identity.check_model(group.name)
        routing = await self._text_routing(relayed, group)
        if not self.state.admission.is_open:
            most = relayed.max_output_tokens or routing.expected_output_tokens
            view = parsed_view(self.arrival, group.name, [routing], most)
            await pass_gate(self.state, self.ticket, view, [routing])
        self.record.begin(group.name, [routing.num_prompt_tokens], relayed.num_choices)
        proposed = self.ticket.replica_ids[0] if self.ticket.replica_ids else ""

        async def way(outlet: Outlet) -> bytes:
            return await self._relay(relayed, routing, proposed, outlet)

        await deliver(self.record, self.send, [way], is_stream=bool(relayed.fields.stream))

    def _choose(self, routing: RoutingRequest) -> str:
        return self.state.router.choose(routing, self.state.clock.now()).id

    async def _on_engines(self, call: Call, placements: list[Placement], outlet: Outlet) -> bytes:
        answer = self._answer_of(call)
        if outlet.writer is None:
            whole = WholeDelivery(self.record, answer)
            await run_requests(self.state, self.ticket, placements, whole)
            outlet.has_said = True
            await send_json(outlet.send, answer.whole())
            return b""
        delivery = StreamDelivery(self.record, answer, outlet, outlet.writer)
        await run_requests(self.state, self.ticket, placements, delivery)
        return event_bytes([*answer.last_chunks(), DONE])

    def _answer_of(self, call: Call) -> Answer:
        return Answer(
            call.format,
            self.record,
            num_choices=call.num_choices,
            envelope={
                "id": call.format.id_prefix + self.record.request_id,
                "object": "",
                "created": int(self.state.wall_clock()),
                "model": call.card.name,
                "system_fingerprint": f"fp_{call.card.revision[:12]}",
            },
            include_usage=call.include_usage,
        )

    async def _relay(
        self, relayed: RelayedBody, routing: RoutingRequest, proposed: str, outlet: Outlet
    ) -> bytes:
        group = self.state.router.resolve(routing.model)
        engines = [replica.id for replica in group.replicas if replica.upstream is None]
        salt = self.caller.identity.salt_elsewhere(relayed.fields.cache_salt or "")
        relay = Relay(self.record, relayed, self.headers, outlet, salt)

        async def on(replica: Replica, hold: Hold) -> None:
            self.ticket.move(replica.id)
            await relay.run(replica, hold)

        await with_failover(
            self.state,
            routing,
            on,
            relay.may_restart,
            excluding=engines,
            proposed=proposed,
        )
        return relay.last

    async def _text_routing(self, relayed: RelayedBody, group: ModelGroup) -> RoutingRequest:
        """Return what routing may know of a prompt by its text; of one replica nobody asks."""
        raw, fields = relayed.raw, relayed.fields
        identity = self.caller.identity
        salt = identity.salt_with(fields.cache_salt or "")
        hashes: tuple[bytes, ...] = ()
        num_tokens = estimated_tokens(raw)
        if len(group.replicas) > 1 or not self.state.admission.is_open:
            if len(raw) <= _INLINE_BYTES:
                hashes, num_tokens = _hashed(raw, group.name, salt)
            else:
                hashes, num_tokens = await self.state.texts.run(
                    lambda: _hashed(raw, group.name, salt), num_bytes=len(raw)
                )
        if relayed.num_prompts > 1:
            num_tokens = estimated_tokens(raw)  # the digests are of the first prompt alone
        most = relayed.max_output_tokens // relayed.num_choices or _UNBOUNDED_TOKENS
        expected = expected_load(self.state, group.name, identity.tenant, most)
        return RoutingRequest(
            model=group.name,
            tenant=identity.tenant,
            session=self.caller.session or fields.user or "",
            priority=identity.priority_of(fields.priority),
            num_prompt_tokens=num_tokens,
            prefix_hashes=hashes,
            expected_output_tokens=relayed.num_choices * expected,
        )


def _hashed(raw: bytes, model: str, salt: str) -> tuple[tuple[bytes, ...], int]:
    """Return (digest chain, estimated tokens) of a body's prompt."""
    body = decode_body(raw, _BODY)
    try:
        text = canonical_prompt(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    return text_prefix_hashes(text, model=model, salt=salt), estimated_tokens(text)
