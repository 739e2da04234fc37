"""Who may come in: every request holds one ticket, judged at the door and again once parsed.

A plain synchronous object that takes `now` and does no I/O, because the simulator drives the same
one. A ticket gives back what it holds exactly once: release() may be called any number of times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import RateLimited, RequestError, Unavailable
from headrace.interfaces import AdmissionPolicy
from headrace.types import AdmissionView, Charge, Queue, Reject, TicketView


@dataclass(slots=True)
class _Level:
    """How full a rate window is; it drains at limit / window per second."""

    amount: float
    time: float


class AdmissionGate:
    """Judges tickets with every policy in order and keeps what admitted tickets were charged.

    The policies come guarded (headrace.policy_guard.AdmissionGuard): one that raises has been replaced
    by its fallback before the gate hears of it.
    """

    def __init__(self, policies: Sequence[AdmissionPolicy] = ()) -> None:
        self._policies = tuple(policies)
        self._held: dict[str, int] = {}
        self._levels: dict[str, _Level] = {}
        self._lanes: dict[str, deque[Ticket]] = {}
        self._num_tickets = 0

    @property
    def num_tickets(self) -> int:
        """Tickets taken and not yet released."""
        return self._num_tickets

    @property
    def num_waiting(self) -> int:
        """Tickets that stand in a lane."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def held(self) -> Mapping[str, int]:
        """Amounts of concurrency now charged, by key."""
        return self._held

    def take(self) -> Ticket:
        """Return a new ticket; it holds nothing until it is judged."""
        self._num_tickets += 1
        return Ticket(self)

    def judge(self, ticket: Ticket, view: TicketView, load: AdmissionView, now: float) -> bool:
        """Return True when admitted, False to ask again later; raise the refusal.

        A waiting ticket is judged only when it heads its lane, so that a lane is first come, first
        served. What the ticket was charged at an earlier stage it keeps.
        """
        if ticket.lane is not None:
            if now >= ticket.wait_until:
                raise _waited_too_long()
            if self._lanes[ticket.lane][0] is not ticket:
                return False
        charges: list[Charge] = []
        for policy in self._policies:
            verdict = policy.admit(view, load, now)
            if isinstance(verdict, Reject):
                raise _refusal(verdict)
            if isinstance(verdict, Queue):
                self._wait(ticket, verdict)
                return False
            charges.extend(verdict.charges)
        self._charge(ticket, charges, now)
        self._leave_lane(ticket)
        return True

    def _charge(self, ticket: Ticket, charges: Sequence[Charge], now: float) -> None:
        """Take all charges or none."""
        for charge in charges:
            self._check_room(charge, now)
        for charge in charges:
            if charge.window_seconds is None:
                self._held[charge.key] = self._held.get(charge.key, 0) + charge.amount
                ticket.charges.append(charge)
            else:
                level = self._levels.setdefault(charge.key, _Level(0.0, now))
                level.amount = self._drained(charge, now) + charge.amount
                level.time = now

    def _check_room(self, charge: Charge, now: float) -> None:
        if charge.window_seconds is None:
            used: float = self._held.get(charge.key, 0)
            wait = 1.0
        else:
            used = self._drained(charge, now)
            excess = used + charge.amount - charge.limit
            wait = excess * charge.window_seconds / max(charge.limit, 1)
        if used + charge.amount > charge.limit:
            window = "" if charge.window_seconds is None else f" per {charge.window_seconds:g} s"
            raise RateLimited(
                f"rate limit: {charge.amount} more would exceed {charge.limit}{window} "
                f"({used:g} in use); wait and send again",
                retry_after_seconds=max(wait, 0.0),
            )

    def _drained(self, charge: Charge, now: float) -> float:
        level = self._levels.get(charge.key)
        if level is None or charge.window_seconds is None:
            return 0.0
        drained = (now - level.time) * charge.limit / charge.window_seconds
        return max(0.0, level.amount - drained)

    def _wait(self, ticket: Ticket, verdict: Queue) -> None:
        if ticket.lane != verdict.lane:
            self._leave_lane(ticket)
            self._lanes.setdefault(verdict.lane, deque()).append(ticket)
            ticket.lane = verdict.lane
            ticket.wait_until = verdict.until

    def _leave_lane(self, ticket: Ticket) -> None:
        if ticket.lane is not None:
            lane = self._lanes[ticket.lane]
            lane.remove(ticket)
            if not lane:
                del self._lanes[ticket.lane]
            ticket.lane = None

    def release(self, ticket: Ticket) -> None:
        """Give back what the ticket holds. A second call does nothing."""
        if ticket.released:
            return
        ticket.released = True
        self._num_tickets -= 1
        self._leave_lane(ticket)
        for charge in ticket.charges:
            left = self._held[charge.key] - charge.amount
            if left:
                self._held[charge.key] = left
            else:
                del self._held[charge.key]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place. Use as a context manager: leaving it releases."""

    gate: AdmissionGate
    charges: list[Charge] = field(default_factory=list)
    lane: str | None = None
    wait_until: float = 0.0
    released: bool = False

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.gate.release(self)


def _refusal(verdict: Reject) -> RequestError:
    kind = RateLimited if verdict.fault == "caller" else Unavailable
    return kind(verdict.reason, retry_after_seconds=verdict.retry_after_seconds)


def _waited_too_long() -> Unavailable:
    return Unavailable(
        "the server is overloaded: the request waited its time in the queue and no place became "
        "free; wait and send again",
        retry_after_seconds=1.0,
    )
