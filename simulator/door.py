"""The gateway's admission in virtual time: the same gate and policies, without an event loop.

A ticket that has to wait asks again when something is given back, and at the gateway's own intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.errors import RequestError
from headrace.gateway.admission import (
    HEAD_ASKS_AGAIN_SECONDS,
    OTHERS_ASK_AGAIN_SECONDS,
    AdmissionGate,
    Outcome,
    Ticket,
)
from headrace.gateway.expected_output import UNKNOWN_OUTPUT_TOKENS
from headrace.gateway.router import Router
from headrace.types import GenerationRequest, RoutingRequest, TicketView


@dataclass(slots=True, eq=False)
class Caller:
    """A request at the door."""

    row: int
    request: GenerationRequest
    routing: RoutingRequest
    ticket: Ticket | None = None
    is_parsed: bool = False
    asks_at: float = float("inf")


class Door:
    """Lets callers in as `headrace.gateway.entrance` does."""

    def __init__(
        self, gate: AdmissionGate, router: Router, ask_at: Callable[[float, Caller], None]
    ) -> None:
        """`ask_at` is told when a caller wants to be asked again."""
        self._gate = gate
        self._router = router
        self._ask_at = ask_at
        self._woken: deque[Caller] = deque()

    @property
    def is_open(self) -> bool:
        """Whether everybody comes in unasked."""
        return self._gate.is_open

    @property
    def num_waiting(self) -> int:
        return self._gate.num_waiting

    def expected_output(self, model: str, tenant: str, max_tokens: int) -> int:
        """Return what routing takes an output for."""
        predict = self._gate.expected_output.predict
        return predict(model, tenant, max_tokens, unknown=UNKNOWN_OUTPUT_TOKENS)

    def ask(self, caller: Caller, now: float) -> bool:
        """Return whether a caller is in; False: it waits. Raises the refusal, and then holds nothing."""
        if self._gate.is_open:
            return True
        if caller.ticket is None:
            caller.ticket = self._gate.take()
            caller.ticket.wake = lambda: self._woken.append(caller)
        try:
            if not caller.is_parsed:
                arrival = TicketView("arrival", tenant=caller.request.tenant)
                if not self._judge(caller, arrival, now):
                    return False
                caller.is_parsed = True
            return self._judge(caller, self._parsed_view(caller), now)
        except RequestError:
            self._gate.release(caller.ticket, Outcome(was_served=False), now)
            raise

    def woken(self) -> list[Caller]:
        """Return whom something given back since the last call has woken."""
        callers = list(dict.fromkeys(self._woken))
        self._woken.clear()
        return callers

    def leave(self, caller: Caller, num_output_tokens: int, now: float) -> None:
        """Give back what an answered caller held, and learn from what it produced."""
        request = caller.request
        self._gate.expected_output.observe(request.model, request.tenant, num_output_tokens)
        if caller.ticket is not None:
            used = len(request.prompt_token_ids) + num_output_tokens
            self._gate.release(caller.ticket, Outcome(used), now)

    def refuse(self, caller: Caller, now: float) -> None:
        """Give back what a caller held that no engine took."""
        if caller.ticket is not None:
            self._gate.release(caller.ticket, Outcome(was_served=False), now)

    def _judge(self, caller: Caller, view: TicketView, now: float) -> bool:
        gate, ticket = self._gate, caller.ticket
        assert ticket is not None
        if ticket.lane is None or gate.is_head(ticket) or now >= ticket.wait_until:
            if view.stage == "parsed":
                replica = self._router.choose(caller.routing, now)
                cached = self._router.matched_tokens(replica, caller.routing)
                view = replace(view, replica_id=replica.id, cached_tokens=cached)
            load = gate.load(self._router.views(view.model), view, now)
            if gate.judge(ticket, view, load, now):
                return True
        pause = HEAD_ASKS_AGAIN_SECONDS if gate.is_head(ticket) else OTHERS_ASK_AGAIN_SECONDS
        at = now + max(1e-9, min(pause, ticket.wait_until - now))
        if at != caller.asks_at:
            caller.asks_at = at
            self._ask_at(at, caller)
        return False

    def _parsed_view(self, caller: Caller) -> TicketView:
        request = caller.request
        most = request.sampling.max_tokens or 0
        predict = self._gate.expected_output.predict
        return TicketView(
            "parsed",
            tenant=request.tenant,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_output_tokens=most,
            expected_output_tokens=predict(request.model, request.tenant, most),
            priority=request.priority,
        )
