"""What a refused request is told: 429 for the caller's own limit, 503 for our overload."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.errors import RateLimited, Unavailable
from headrace.gateway.limit_store import LimitState, Taken
from headrace.types import Charge, Reject

_NEVER_RETRY_AFTER_SECONDS = 60.0
Header = tuple[bytes, bytes]


def rejection(verdict: Reject) -> RateLimited | Unavailable:
    """Return the error of a policy's Reject."""
    kind = RateLimited if verdict.fault == "caller" else Unavailable
    return kind(
        verdict.reason, retry_after_seconds=verdict.retry_after_seconds, reason=verdict.code
    )


def limit_refusal(taken: Taken) -> RateLimited:
    """Return the error of a charge that found no room. It names amounts, and nobody."""
    charge = taken.refused
    assert charge is not None
    used = next(state.used for state in taken.states if state.charge is charge)
    what = "in use" if charge.window_seconds is not None else "being served"
    if charge.window_seconds is None:
        limit, kind = f"{charge.limit} at a time", "concurrency"
    else:
        limit = f"{charge.limit} {charge.unit} per {charge.window_seconds:g} s"
        kind = charge.unit
        if charge.capacity != charge.limit:
            limit += f" and {charge.capacity} at once"
    if math.isinf(taken.retry_after_seconds):
        remedy = "lower max_tokens or shorten the prompt" if kind == "tokens" else "send fewer"
        return RateLimited(
            f"rate limit: this request needs {charge.amount} {charge.unit}, more than the {limit} "
            f"that are allowed; {remedy}",
            retry_after_seconds=_NEVER_RETRY_AFTER_SECONDS,
            reason="request_too_large",
        )
    return RateLimited(
        f"rate limit: {charge.amount} more {charge.unit} would exceed {limit} "
        f"({used:.0f} {what}); wait {taken.retry_after_seconds:.1f} s and send again",
        retry_after_seconds=taken.retry_after_seconds,
        reason=kind,
    )


def pool_refusal(charge: Charge) -> Unavailable:
    """Return the error of KV blocks that are not free."""
    return Unavailable(
        f"the server is overloaded: {charge.amount} KV blocks are not free among the "
        f"{charge.limit} of the replica; wait and send again",
        retry_after_seconds=1.0,
        reason="kv_blocks",
    )


def waited_too_long() -> Unavailable:
    return Unavailable(
        "the server is overloaded: the request waited its time in the queue and no place became "
        "free; wait and send again",
        retry_after_seconds=1.0,
        reason="queue_timeout",
    )


def rate_limit_headers(states: Sequence[LimitState], *, never_fits: bool) -> list[Header]:
    """Return x-ratelimit-{limit,remaining,reset}-{requests,tokens} of the tightest limit of each unit.

    As OpenAI's: how much may be taken per window, how much may be taken now, and how long until all of
    it may be. Nothing where there is no such limit.
    """
    headers: list[Header] = []
    for unit in ("requests", "tokens"):
        rates = [
            state
            for state in states
            if state.charge.unit == unit and state.charge.window_seconds is not None
        ]
        if not rates:
            continue
        tightest = min(rates, key=lambda state: state.remaining / max(state.charge.capacity, 1))
        for name, value in (
            ("limit", str(tightest.charge.limit)),
            ("remaining", str(tightest.remaining)),
            ("reset", duration(tightest.reset_seconds)),
        ):
            headers.append((f"x-ratelimit-{name}-{unit}".encode(), value.encode()))
    if never_fits:
        headers.append((b"x-should-retry", b"false"))
    return headers


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers write it: "350ms", "6.5s", "1m3s", "2h0m5s"."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
