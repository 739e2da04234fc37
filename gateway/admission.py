"""Who may come in: every request holds one ticket, judged at the door and again once parsed.

A plain synchronous object that takes `now` and does no I/O, because the simulator drives the same one;
only the LimitStore beside it may wait, between `decide` and `conclude`. A ticket gives back what it holds
exactly once: release() may be called any number of times.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import RateLimited, Unavailable
from headrace.gateway.drain_rate import DrainRate
from headrace.gateway.expected_output import ExpectedOutput
from headrace.gateway.ledger import Ledger
from headrace.gateway.limit_store import LimitState, LimitStore, MemoryLimitStore, Settlement, Taken
from headrace.gateway.refusals import (
    Header,
    limit_refusal,
    pool_refusal,
    rate_limit_headers,
    rejection,
    waited_too_long,
)
from headrace.interfaces import AdmissionPolicy
from headrace.types import (
    AdmissionView,
    Charge,
    LaneView,
    Queue,
    Reject,
    ReplicaView,
    TicketView,
)

HEAD_ASKS_AGAIN_SECONDS = 0.1
OTHERS_ASK_AGAIN_SECONDS = 5.0
"""How long the head of a lane, and whoever stands behind it, waits at most before it asks again unwoken."""
_MAX_REASONS = 64
"""Of refusals that are counted apart, whatever a policy makes up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request, as far as limits care."""

    num_tokens: int | None = None
    """Prompt and output tokens it really used; None: as many as it was charged for."""
    was_served: bool = True
    """False: refused, or failed by the server; then its rates get back all they were charged."""


@dataclass(slots=True)
class _Lane:
    """Tickets that wait, first come first served."""

    tickets: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    num_requests: int = 0
    num_tokens: int = 0

    @property
    def head(self) -> Ticket:
        return next(iter(self.tickets))


class AdmissionGate:
    """Judges tickets with every policy in order and keeps what admitted tickets were charged.

    The policies come guarded (headrace.policy_guard.AdmissionGuard): one that raises has been replaced
    by its fallback before the gate hears of it.
    """

    def __init__(
        self,
        policies: Sequence[AdmissionPolicy] = (),
        *,
        ledger: Ledger | None = None,
        store: LimitStore | None = None,
    ) -> None:
        self.use(policies)
        self._ledger = Ledger() if ledger is None else ledger
        self.store: LimitStore = MemoryLimitStore() if store is None else store
        self.expected_output = ExpectedOutput()
        self._rates: dict[str, DrainRate] = {}
        self._lanes: dict[str, _Lane] = {}
        self._instance = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._num_tickets = 0
        self.refusals: Counter[str] = Counter()
        """Refused tickets by machine-readable reason."""

    @property
    def is_open(self) -> bool:
        """Whether there is no policy to ask."""
        return not self._policies

    @property
    def policies(self) -> Sequence[AdmissionPolicy]:
        """Who is asked, in this order."""
        return self._policies

    def use(self, policies: Sequence[AdmissionPolicy]) -> None:
        """Ask these from the next ticket on. What tickets inside hold, they keep."""
        self._policies = tuple(policies)
        self._places = _places(policies)

    @property
    def num_tickets(self) -> int:
        """Tickets taken and not yet released."""
        return self._num_tickets

    @property
    def num_waiting(self) -> int:
        """Tickets that stand in a lane."""
        return sum(len(lane.tickets) for lane in self._lanes.values())

    @property
    def queued_requests(self) -> int:
        """Waiting requests, each choice counted."""
        return sum(lane.num_requests for lane in self._lanes.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of waiting requests and the output tokens expected of them."""
        return sum(lane.num_tokens for lane in self._lanes.values())

    @property
    def held(self) -> Mapping[str, int]:
        """Amounts of concurrency now charged, by key."""
        return self.store.held

    def take(self) -> Ticket:
        """Return a new ticket; it holds nothing until it is judged."""
        self._num_tickets += 1
        return Ticket(self, f"{self._instance}-{next(self._numbers)}")

    def load(
        self, replicas: tuple[ReplicaView, ...], view: TicketView, now: float
    ) -> AdmissionView:
        """Return what the policies may know of the load when they judge this ticket."""
        rate = self._rates[view.model].tokens_per_second(now) if view.model in self._rates else 0.0
        waiting = self.queued_tokens
        return AdmissionView(
            replicas=replicas,
            queued_requests=self.queued_requests,
            queued_tokens=waiting,
            predicted_wait_seconds=waiting / rate if rate else 0.0,
            lanes=tuple(
                LaneView(name, lane.num_requests, lane.num_tokens)
                for name, lane in self._lanes.items()
            ),
            tokens_per_second=rate,
        )

    def judge(self, ticket: Ticket, view: TicketView, load: AdmissionView, now: float) -> bool:
        """Return True when admitted, False to ask again later; raise the refusal.

        decide, take and conclude in one, for limits that are counted in memory.
        """
        assert isinstance(self.store, MemoryLimitStore), "only limits in memory are taken at once"
        charges = self.decide(ticket, view, load, now)
        if charges is None:
            return False
        self.conclude(ticket, charges, self.store.take_now(charges, now), now)
        return True

    def decide(
        self, ticket: Ticket, view: TicketView, load: AdmissionView, now: float
    ) -> list[Charge] | None:
        """Return the charges to take from the LimitStore, None to ask again later; raise the refusal.

        A waiting ticket is judged only when it heads its lane, so that a lane is first come, first
        served. KV blocks are reserved here and now. What the ticket was charged at an earlier stage it
        keeps.
        """
        ticket.time = now
        if ticket.lane is not None:
            if now >= ticket.wait_until:
                raise self._refused(waited_too_long())
            if self._lanes[ticket.lane].head is not ticket:
                return None
            view = replace(view, lane=ticket.lane)
        ticket.view = view
        charges: list[Charge] = []
        for policy, place in zip(self._policies, self._places, strict=True):
            verdict = policy.admit(view, load, now)
            if isinstance(verdict, Reject):
                raise self._refused(rejection(verdict))
            if isinstance(verdict, Queue):
                self._wait(ticket, verdict)
                return None
            charges.extend(_at_place(place, verdict.charges) if place else verdict.charges)
        self._reserve(ticket, [charge for charge in charges if charge.replica_id])
        return [charge for charge in charges if not charge.replica_id]

    def conclude(self, ticket: Ticket, charges: Sequence[Charge], taken: Taken, now: float) -> None:
        """Let the ticket in with what was taken, or raise the refusal."""
        ticket.states.extend(taken.states)
        if taken.refused is not None:
            ticket.never_fits = math.isinf(taken.retry_after_seconds)
            raise self._refused(limit_refusal(taken))
        if taken.charged:
            ticket.charges.extend(charges)
        if ticket.released:  # while the store was asked
            self._give_back(ticket, Outcome(was_served=False), now)
        self._leave_lane(ticket)

    def _refused(self, error: RateLimited | Unavailable) -> RateLimited | Unavailable:
        reason = error.reason or "policy"
        if reason not in self.refusals and len(self.refusals) >= _MAX_REASONS:
            reason = "other"
        self.refusals[reason] += 1
        return error

    def _reserve(self, ticket: Ticket, charges: Sequence[Charge]) -> None:
        """Reserve KV blocks, all or none. A policy asks only for what it has seen to be free."""
        wanted: Counter[str] = Counter()
        for charge in charges:
            wanted[charge.replica_id] += charge.amount
            reserved = self._ledger.reserved_blocks(charge.replica_id)
            if reserved + wanted[charge.replica_id] > charge.limit:
                raise self._refused(pool_refusal(charge))
        for charge in charges:
            self._ledger.reserve(charge.replica_id, charge.amount)
            ticket.charges.append(charge)

    def move(self, ticket: Ticket, replica_id: str, prompt_index: int | None) -> None:
        """Keep a prompt's KV blocks (None: every prompt's) on the replica that serves it now.

        As many as it was admitted with, whether or not they are free there: who was admitted is not
        judged again, and who comes later finds the room taken where it is.
        """
        was_moved = False
        for place, charge in enumerate(ticket.charges):
            if charge.replica_id in ("", replica_id):
                continue
            if prompt_index is None or charge.prompt_index == prompt_index:
                self._ledger.reserve(charge.replica_id, -charge.amount)
                self._ledger.reserve(replica_id, charge.amount)
                ticket.charges[place] = replace(charge, replica_id=replica_id)
                was_moved = True
        if was_moved:
            self.wake()

    def _wait(self, ticket: Ticket, verdict: Queue) -> None:
        if ticket.lane == verdict.lane:
            return
        self._leave_lane(ticket)
        lane = self._lanes.setdefault(verdict.lane, _Lane())
        lane.tickets[ticket] = None
        lane.num_requests += ticket.view.num_choices
        lane.num_tokens += ticket.num_tokens
        ticket.lane = verdict.lane
        ticket.wait_until = verdict.until

    def _leave_lane(self, ticket: Ticket) -> None:
        if ticket.lane is None:
            return
        lane = self._lanes[ticket.lane]
        del lane.tickets[ticket]
        lane.num_requests -= ticket.view.num_choices
        lane.num_tokens -= ticket.num_tokens
        if not lane.tickets:
            del self._lanes[ticket.lane]
        ticket.lane = None
        self.wake()

    def is_head(self, ticket: Ticket) -> bool:
        """Whether a waiting ticket is the next of its lane."""
        return ticket.lane is not None and self._lanes[ticket.lane].head is ticket

    def wake(self) -> None:
        """Tell the head of each lane to ask again: something was given back."""
        for lane in self._lanes.values():
            lane.head.wake()

    def release(self, ticket: Ticket, outcome: Outcome | None = None, now: float = 0.0) -> None:
        """Give back what the ticket holds; rates, according to the outcome. A second call does nothing."""
        if ticket.released:
            return
        ticket.released = True
        self._num_tickets -= 1
        self._leave_lane(ticket)
        self._give_back(ticket, outcome or Outcome(), max(now, ticket.time))
        self.wake()

    def _give_back(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        used = outcome.num_tokens
        settlements = []
        for charge in ticket.charges:
            if charge.replica_id:
                self._ledger.reserve(charge.replica_id, -charge.amount)
            elif not outcome.was_served:
                settlements.append(Settlement(charge, charge.amount))
            elif charge.unit == "tokens" and charge.window_seconds and used is not None:
                settlements.append(Settlement(charge, charge.amount - used))
            else:
                settlements.append(Settlement(charge))
        was_admitted = bool(ticket.charges)
        ticket.charges.clear()
        if settlements:
            self.store.settle(ticket.holder, settlements, now)
        if was_admitted and used is not None and ticket.view.model:
            rate = self._rates.setdefault(ticket.view.model, DrainRate())
            rate.observe(ticket.num_tokens, now)


def _places(policies: Sequence[AdmissionPolicy]) -> tuple[int, ...]:
    """Return how many policies of the same name stand before each."""
    before: Counter[str] = Counter()
    places = []
    for policy in policies:
        places.append(before[policy.name])
        before[policy.name] += 1
    return tuple(places)


def _at_place(place: int, charges: Sequence[Charge]) -> list[Charge]:
    """Return the charges of a policy that is listed again, counted apart from those of its namesakes."""
    return [replace(charge, key=f"{place + 1}/{charge.key}") for charge in charges]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place. Use as a context manager: leaving it releases."""

    gate: AdmissionGate
    holder: str = ""
    """Unique among all gateways that share limits."""
    charges: list[Charge] = field(default_factory=list)
    states: list[LimitState] = field(default_factory=list)
    """How full each limit was that was asked for this ticket."""
    replica_ids: tuple[str, ...] = ()
    """Where routing proposed to send each prompt of an admitted call; empty where nobody asked yet."""
    view: TicketView = field(default_factory=lambda: TicketView("arrival"))
    """As it was judged last."""
    lane: str | None = None
    wait_until: float = 0.0
    time: float = 0.0
    """Of the last judgement."""
    wake: Callable[[], None] = lambda: None
    """Called where it may be worth asking again."""
    never_fits: bool = False
    """It asked for more than a limit allows at once: sending it again is of no use."""
    released: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and the output tokens expected, of all prompts and choices."""
        return self.view.num_prompt_tokens + self.view.expected_output_tokens

    def settle(self, outcome: Outcome, now: float) -> None:
        """Release, saying what became of the request."""
        self.gate.release(self, outcome, now)

    def move(self, replica_id: str, prompt_index: int | None = None) -> None:
        """Say where a prompt is served now (None: all of them), so that its KV blocks are kept there."""
        if self.charges:
            self.gate.move(self, replica_id, prompt_index)

    def headers(self) -> list[Header]:
        """Return what the answer's headers say of the caller's limits."""
        return rate_limit_headers(self.states, never_fits=self.never_fits)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.gate.release(self)
