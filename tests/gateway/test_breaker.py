"""A breaker opens after failures in a row, lets one trial through, and closes on its success alone."""

from __future__ import annotations

import pytest

from headrace.errors import (
    EngineFailed,
    ErrorInfo,
    InvalidRequest,
    RateLimited,
    RemoteError,
    RequestError,
    Unavailable,
)
from headrace.gateway.breaker import BreakerRule, CircuitBreaker
from headrace.gateway.failover import is_replicas_fault, speaks_against

RULE = BreakerRule(max_failures=3, first_open_seconds=1.0, max_open_seconds=4.0)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(RULE)
    for _ in range(3):
        assert breaker.allows(now)
        breaker.sent()
        breaker.failed(now)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(RULE)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.is_closed
    assert opened().state(0.5) == "open" and not opened().allows(0.5)
    assert opened().seconds_to_trial(0.25) == 0.75


def test_half_open_is_one_trial_and_its_outcome_decides() -> None:
    breaker = opened()
    assert breaker.allows(1.0) and breaker.state(1.0) == "half_open"
    assert breaker.sent()
    assert not breaker.allows(1.0)
    breaker.failed(1.0, is_trial=True)
    assert not breaker.allows(2.9) and breaker.allows(3.0)  # twice as long
    assert breaker.sent()
    breaker.succeeded(is_trial=True)
    assert breaker.is_closed and breaker.allows(3.0) and not breaker.sent()


def test_the_time_of_rest_doubles_up_to_its_bound() -> None:
    breaker, now = opened(), 0.0
    for rest in (1.0, 2.0, 4.0, 4.0):
        assert breaker.seconds_to_trial(now) == rest
        now += rest
        breaker.sent()
        breaker.failed(now, is_trial=True)
    assert breaker.opened_total == 5


def test_what_was_sent_before_it_opened_tells_nothing() -> None:
    breaker = opened()
    breaker.succeeded()
    breaker.failed(0.5)
    assert breaker.state(0.9) == "open" and breaker.allows(1.0)


def test_an_abandoned_trial_gives_its_place_back() -> None:
    breaker = opened()
    breaker.sent()
    breaker.abandoned(is_trial=True)
    assert breaker.allows(1.0) and not breaker.is_closed


def test_a_probe_ends_the_rest_early_but_closes_nothing() -> None:
    breaker = opened()
    breaker.try_now(0.1)
    assert breaker.allows(0.1) and not breaker.is_closed
    breaker = CircuitBreaker(RULE)
    breaker.trip(5.0)
    assert not breaker.allows(5.5)


def remote(status: int, retry_after: float | None = None) -> RemoteError:
    info = ErrorInfo(code="x", message="x", http_status=status, retry_after_seconds=retry_after)
    return RemoteError(info)


@pytest.mark.parametrize(
    ("error", "elsewhere", "counts"),
    [
        (InvalidRequest("too long"), False, False),
        (RateLimited("too many"), False, False),
        (remote(404), False, False),
        (EngineFailed("died"), True, True),
        (Unavailable("full", retry_after_seconds=1.0), True, False),
        (remote(503, 2.0), True, False),
        (remote(503), True, True),
        (remote(500), True, True),
        (remote(504), True, True),
    ],
)
def test_a_callers_mistake_never_counts_and_is_sent_nowhere_else(
    error: RequestError, elsewhere: bool, counts: bool
) -> None:
    """R01, O09: 4xx and 429 are final; connect errors, timeouts and 5xx count."""
    assert is_replicas_fault(error) is elsewhere
    assert speaks_against(error) is counts
