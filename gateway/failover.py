"""Replica after replica for one piece of work, for as long as nothing of an answer has gone out.

A caller's own mistake and a caller's own limit are final: sending them elsewhere would change nothing, and
a second layer of retries behind the client's multiplies load.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import structlog

from headrace.errors import RequestError, Unavailable
from headrace.gateway.ledger import Hold
from headrace.gateway.replica import Replica
from headrace.gateway.state import GatewayState
from headrace.types import RoutingRequest

Work = Callable[[Replica, Hold], Awaitable[None]]
"""(where, what it holds of the load there: told when the prompt is done)."""
MAX_ATTEMPTS = 3
"""Of one request, so that one which breaks whatever serves it breaks no more than these."""

_logger = structlog.get_logger("headrace.gateway")


async def with_failover(
    state: GatewayState,
    routing: RoutingRequest,
    work: Work,
    may_restart: Callable[[], bool],
    *,
    excluding: Collection[str] = (),
    proposed: str = "",
) -> None:
    """Choose a replica and run `work` there; where the replica fails it, on another one.

    `proposed` is a choice already made, kept where it still can serve. `may_restart` says whether the
    work can begin anew, and makes it forget what it did. Raises what the last replica raised, and
    Unavailable where there is none to begin with.
    """
    tried = [*excluding]
    failure: RequestError | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            replica = _choose(state, routing, tried, proposed)
        except Unavailable:
            if failure is None:
                raise
            break
        try:
            await _attempt(state, replica, routing, work)
        except RequestError as error:
            if not is_replicas_fault(error) or not may_restart():
                raise
            failure = error
            tried.append(replica.id)
            _logger.warning("request fails over", replica=replica.id, reason=str(error))
        else:
            return
    assert failure is not None
    raise failure


def _choose(
    state: GatewayState, routing: RoutingRequest, tried: Collection[str], proposed: str
) -> Replica:
    now = state.clock.now()
    if proposed and proposed not in tried:
        replica = state.router.find(proposed)
        if replica is not None and replica.can_serve(now):
            return replica
    return state.router.choose(routing, now, excluding=tried)


async def _attempt(
    state: GatewayState,
    replica: Replica,
    routing: RoutingRequest,
    work: Work,
) -> None:
    """Run the work on one replica and tell its breaker how that went."""
    breaker = replica.breaker
    structlog.contextvars.bind_contextvars(replica=replica.id)
    with state.router.place(replica, routing) as hold:
        is_trial = breaker.sent()

        def answers() -> None:
            nonlocal is_trial
            breaker.succeeded(is_trial=is_trial)
            is_trial = False

        if is_trial:  # others need not wait for the end of a long stream
            hold.on_first_news = answers
        try:
            await work(replica, hold)
        except RequestError as error:
            if speaks_against(error):
                breaker.failed(state.clock.now(), is_trial=is_trial)
            elif is_trial:
                breaker.abandoned(is_trial=True)
            raise
        except BaseException:
            breaker.abandoned(is_trial=is_trial)
            raise
        breaker.succeeded(is_trial=is_trial)


def is_replicas_fault(error: RequestError) -> bool:
    """Whether another replica may do better."""
    return error.info().http_status >= 500


def speaks_against(error: RequestError) -> bool:
    """Whether the failure counts against the replica.

    A 503 that says when to come again is a healthy replica with too much to do.
    """
    info = error.info()
    is_full = info.http_status == 503 and info.retry_after_seconds is not None
    return info.http_status >= 500 and not is_full
