"""What a policy may answer: each check returns the answer to use, or raises Nonsense with the reason."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from headrace.types import (
    Admit,
    Charge,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    SchedulerView,
)


class Nonsense(Exception):
    """A policy's answer breaks its contract."""


def printable(text: str, most: int = 300) -> str:
    """Return text, shortened, that every encoding of a frame and a log takes."""
    short = text if len(text) <= most else f"{text[:most]}…"
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


def checked_order(answer: Any, waiting: Sequence[RequestView]) -> list[RequestView]:
    """Return the order of `rank_waiting` as a list: the same views, each exactly once."""
    order: list[RequestView] = list(itertools.islice(answer, len(waiting) + 1))
    if isinstance(answer, GeneratorType):
        answer.close()  # here, where its clean-up is looked after too
    if len(order) != len(waiting):
        count = "more than" if len(order) > len(waiting) else f"{len(order)} of"
        raise Nonsense(f"the order has {count} the {len(waiting)} waiting requests")
    if {id(request) for request in order} != {id(request) for request in waiting}:
        raise Nonsense("the order is no permutation of the waiting requests")
    return order


def checked_time(answer: Any) -> float | None:
    """Return the time of `next_decision_at` on the engine's clock, or None."""
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or math.isnan(answer):
        raise Nonsense(f"the time is no number and not None: {answer!r}")
    return float(answer)


def checked_count(answer: Any) -> int:
    """Return the answer of `num_to_start`: 0 or more."""
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
        raise Nonsense(f"the number to start is no whole number of at least 0: {answer!r}")
    return answer


def checked_key(answer: Any, now: float) -> tuple[tuple[float, ...], float | None]:
    """Return the answer of `key`, its value as a tuple of numbers: tuples of any lengths compare."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Nonsense(f"the key is no (value, ask_again_at): {answer!r}")
    value, again = answer
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if not isinstance(number, (int, float)) or math.isnan(number):
            raise Nonsense(f"the value is no number and no tuple of numbers: {value!r}")
    ask_again_at = checked_time(again)
    if ask_again_at is not None and ask_again_at <= now:
        raise Nonsense(f"ask_again_at is {ask_again_at}, which is past: it is {now}")
    return numbers, ask_again_at


def checked_victim(answer: Any, running: Sequence[RequestView]) -> RequestView:
    """Return the victim of `choose_victim`: one of the running views itself, not a copy."""
    if any(request is answer for request in running):
        victim: RequestView = answer
        return victim
    raise Nonsense(f"the victim is not one of the {len(running)} running requests: {answer!r}")


def checked_budget(answer: Any, view: SchedulerView) -> int:
    """Return the tokens of `prefill_budget`, at most the step's own budget."""
    try:
        budget = operator.index(answer)
    except TypeError:
        raise Nonsense(f"the budget is no whole number: {answer!r}") from None
    if isinstance(answer, bool) or budget < 0:
        raise Nonsense(f"the budget is no number of tokens: {answer!r}")
    if budget == 0 and view.decoding == 0 and view.token_budget > 0:
        raise Nonsense("a budget of 0 while nothing decodes: no request would ever run")
    return min(budget, view.token_budget)


def checked_replica_id(answer: Any, replicas: Sequence[ReplicaView]) -> str:
    """Return the id of `choose`: that of a replica which was offered."""
    for replica in replicas:
        if replica.id == answer:
            return replica.id
    known = ", ".join(replica.id for replica in replicas)
    raise Nonsense(f"no replica {answer!r} was offered, only {known}")


def checked_verdict(answer: Any, now: float) -> Admit | Queue | Reject:
    """Return the verdict of `admit` where its fields make sense: they go into sums and headers."""
    if isinstance(answer, Admit):
        for charge in answer.charges:
            _check_charge(charge)
        return answer
    if isinstance(answer, Queue):
        if not isinstance(answer.lane, str):
            raise Nonsense(f"the lane is no text: {answer.lane!r}")
        if not answer.until > now:
            raise Nonsense(f"queued until {answer.until}, which is past: it is {now}")
        return answer
    if isinstance(answer, Reject):
        if answer.fault not in ("caller", "server"):
            raise Nonsense(f"the fault must be 'caller' or 'server', got {answer.fault!r}")
        if not 0 <= answer.retry_after_seconds < math.inf:
            raise Nonsense(
                f"retry_after_seconds is below 0 or no number: {answer.retry_after_seconds!r}"
            )
        for word in (answer.reason, answer.code):
            if not isinstance(word, str):
                raise Nonsense(f"a reason and its code are texts, got {word!r}")
        return answer
    raise Nonsense(f"the verdict is no Admit, Queue or Reject: {answer!r}")


def _check_charge(charge: Any) -> None:
    if not isinstance(charge, Charge):
        raise Nonsense(f"no Charge: {charge!r}")
    if not (isinstance(charge.key, str) and isinstance(charge.replica_id, str)):
        raise Nonsense(f"the key or the replica of a charge is no text: {charge!r}")
    if not isinstance(charge.prompt_index, int) or charge.prompt_index < 0:
        raise Nonsense(f"the prompt of a charge is no index: {charge!r}")
    if charge.amount < 0 or charge.limit < 0 or (charge.window_seconds or 1.0) <= 0:
        raise Nonsense(f"a charge below zero: {charge!r}")
    amounts = (charge.amount, charge.limit, charge.capacity, charge.window_seconds or 1.0)
    if not all(map(math.isfinite, amounts)):
        raise Nonsense(f"a charge without bounds: {charge!r}")
