"""Limits in memory: buckets that drain, places that are held, all charges or none, bounded memory."""

from __future__ import annotations

import math

import pytest

from headrace.gateway.limit_store import LimitState, MemoryLimitStore, Settlement
from headrace.gateway.refusals import duration, rate_limit_headers
from headrace.types import Charge

PER_MINUTE = 60.0


def requests(amount: int, limit: int = 60, burst: int | None = None) -> Charge:
    return Charge("requests/a", amount, limit, PER_MINUTE, burst=burst)


def tokens(amount: int, limit: int = 6000) -> Charge:
    return Charge("tokens/a", amount, limit, PER_MINUTE, unit="tokens")


def test_a_full_bucket_says_when_there_is_room() -> None:
    store = MemoryLimitStore()
    assert store.take_now([requests(60)], 0.0).refused is None
    taken = store.take_now([requests(2)], 0.5)
    assert taken.refused == requests(2)
    assert taken.retry_after_seconds == pytest.approx(1.5)
    assert store.take_now([requests(2)], 2.0).refused is None


def test_all_charges_or_none() -> None:
    store = MemoryLimitStore()
    held = Charge("concurrency/a", 1, 1)
    assert store.take_now([held], 0.0).refused is None
    taken = store.take_now([requests(1), tokens(10), held], 0.0)
    assert taken.refused == held
    assert [state.used for state in taken.states] == [0.0, 0.0, 1.0]
    assert store.take_now([requests(60), tokens(6000)], 0.0).refused is None


def test_two_charges_on_one_key_count_both() -> None:
    store = MemoryLimitStore()
    assert store.take_now([requests(40), requests(30)], 0.0).refused == requests(30)
    assert store.take_now([requests(40), requests(20)], 0.0).refused is None


def test_a_burst_is_the_size_of_the_bucket() -> None:
    store = MemoryLimitStore()
    small = requests(6, burst=5)
    taken = store.take_now([small], 0.0)
    assert taken.refused == small and math.isinf(taken.retry_after_seconds)
    assert store.take_now([requests(5, burst=5)], 0.0).refused is None
    assert store.take_now([requests(1, burst=5)], 0.9).refused is not None
    assert store.take_now([requests(1, burst=5)], 1.0).refused is None


def test_request_and_token_limits_at_95_percent_refuse_nobody_for_three_minutes() -> None:
    """O08: each bucket fills all the time; there is no common reset at which limits bite early."""
    store = MemoryLimitStore()
    for number in range(int(3 * 57)):
        now = number * 60 / 57
        charges = [requests(1, limit=60, burst=2), tokens(100, limit=6000)]
        assert store.take_now(charges, now).refused is None


def test_what_was_not_used_is_given_back() -> None:
    store = MemoryLimitStore()
    store.take_now([tokens(6000)], 0.0)
    assert store.take_now([tokens(1000)], 0.0).refused is not None
    store.settle("holder", [Settlement(tokens(6000), refund=5000)], 0.0)
    assert store.take_now([tokens(5000)], 0.0).refused is None
    assert store.take_now([tokens(1)], 0.0).refused is not None


def test_giving_back_more_than_there_is_left_makes_nothing_below_zero() -> None:
    store = MemoryLimitStore()
    store.take_now([tokens(3000)], 0.0)
    store.settle("holder", [Settlement(tokens(3000), refund=3000)], 30.0)
    taken = store.take_now([tokens(6000)], 30.0)
    assert taken.refused is None and taken.states[0].used == 6000


def test_drained_buckets_are_forgotten() -> None:
    store = MemoryLimitStore()
    for number in range(20_000):
        charge = Charge(f"requests/{number}", 1, 60, PER_MINUTE)
        assert store.take_now([charge], number * 0.01).refused is None
    assert len(store) <= 2048


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.35, "350ms"), (6.5, "6.5s"), (63, "1m3s"), (7205, "2h0m5s"), (1e-6, "1ms")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_of_the_tightest_limit_of_each_unit() -> None:
    states = [
        LimitState(Charge("a", 1, 60, 60.0), 30.0),
        LimitState(Charge("b", 1, 10, 60.0), 9.0),
        LimitState(Charge("c", 1, 1), 1.0),
        LimitState(Charge("d", 5, 6000, 60.0, unit="tokens"), 600.0),
    ]
    assert dict(rate_limit_headers(states, never_fits=True)) == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"54s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5400",
        b"x-ratelimit-reset-tokens": b"6s",
        b"x-should-retry": b"false",
    }
    assert rate_limit_headers(states[2:3], never_fits=False) == []
