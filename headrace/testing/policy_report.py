"""A verdict on a policy that people can read: each promise of its contract, kept or broken and how.

The same checks that the built-ins are tested with, and for scheduling policies two more: the time of
a call with a long queue, and whether a request can starve under a load that never ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.policy_answers import checked_order
from headrace.policy_guard import GuardLimits
from headrace.policy_watchdog import PolicyTimeout, Watchdog
from headrace.testing.policies import (
    check_admission_policy,
    check_eviction_policy,
    check_quantization_policy,
    check_routing_policy,
    check_scheduling_policy,
)
from headrace.testing.policy_trial import Job, serve
from headrace.types import RequestView, SchedulerView, TenantService

STARVATION_SECONDS = 90.0
"""A request that has no token so long after it came, while later ones are served, starves."""
_QUEUE_LENGTH = 1000
_LOOK_SECONDS = 30.0
_LIMIT = GuardLimits().slow_seconds
_IN_TIME = f"a queue of {_QUEUE_LENGTH:,} is ranked well within {_LIMIT * 1000:.0f} ms"
_FAIR = f"nobody waits longer than {STARVATION_SECONDS:.0f} s under a load that never ends"


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise: what it is, and how it is broken; "" where it is kept."""

    promise: str
    breach: str = ""
    measured: str = ""


def examine(kind: str, make: Callable[[], Any]) -> list[Finding]:
    """Return what was found of a policy of this kind; `make` builds a fresh one each time."""
    check, promise = _CONTRACTS[kind]
    looks: list[tuple[str, Callable[[], Finding]]] = [
        (promise, lambda: _contract(check, make, promise))
    ]
    if kind == "scheduling":
        looks += [(_IN_TIME, lambda: _time_per_call(make)), (_FAIR, lambda: _starvation(make))]
    findings: list[Finding] = []
    for promise, look in looks:
        findings.append(_looked(promise, look))
        if findings[-1].breach:
            break
    return findings


def _looked(promise: str, look: Callable[[], Finding]) -> Finding:
    """Return what `look` finds; whatever a policy raises, and where it does not come back, is a breach."""
    try:
        finding: Finding = Watchdog().call(look, (), _LOOK_SECONDS)
    except KeyboardInterrupt:
        raise
    except PolicyTimeout:
        return Finding(promise, f"it did not come to an end within {_LOOK_SECONDS:.0f} s")
    except BaseException as error:
        return Finding(promise, f"it raised {type(error).__name__}: {error}")
    return finding


def _contract(check: Callable[..., None], make: Callable[[], Any], promise: str) -> Finding:
    for seed in range(5):
        try:
            check(make, seed=seed)
        except AssertionError as error:
            return Finding(promise, str(error))
    return Finding(promise)


def _time_per_call(make: Callable[[], Any]) -> Finding:
    best = max(_seconds_per_call(make, num_tenants) for num_tenants in (1, 20))
    measured = f"{best * 1000:.2f} ms"
    if best > _LIMIT / 2:
        return Finding(_IN_TIME, f"it takes {measured}; longer calls are cut off", measured)
    return Finding(_IN_TIME, measured=measured)


def _seconds_per_call(make: Callable[[], Any], num_tenants: int) -> float:
    rng = random.Random(0)
    waiting = [
        RequestView(
            f"request-{number}",
            tenant=f"tenant-{number % num_tenants}",
            priority=number % 3,
            arrival_time=number * 0.01,
            num_prompt_tokens=rng.randint(1, 4096),
        )
        for number in range(_QUEUE_LENGTH)
    ]
    tenants = {f"tenant-{number}": TenantService(number * 100, number * 10) for number in range(20)}
    view = SchedulerView(20.0, 512, 8, 2, 100, 1000, tenants=tenants)
    policy, times = make(), []
    for _ in range(5):
        start = time.perf_counter()
        answer = policy.rank_waiting(list(waiting), view)
        times.append(time.perf_counter() - start)
        checked_order(answer, waiting)
    return min(times)


def adversarial_load(kind: str) -> tuple[list[Job], int]:
    """Return more load than can be served, and which job it is aimed at.

    "urgent": every other request is shorter and of higher priority. "crowd": many tenants, each
    with a first request. Both go on longer than STARVATION_SECONDS.
    """
    times = [0.18 * number for number in range(int((STARVATION_SECONDS + 20.0) / 0.18))]
    if kind == "urgent":
        jobs = [Job(at, 2000, 4, priority=-1000, ttft_target_seconds=2.0) for at in times]
        victim = Job(5.0, 6000, 4, priority=1, ttft_target_seconds=2.0)
    else:
        jobs = [Job(at, 2000, 4, tenant=f"tenant-{number}") for number, at in enumerate(times)]
        victim = Job(5.0, 6000, 4, tenant="old")
    jobs.append(victim)
    return jobs, len(jobs) - 1


def _starvation(make: Callable[[], Any]) -> Finding:
    longest = 0.0
    for kind in ("urgent", "crowd"):
        jobs, victim = adversarial_load(kind)
        end = jobs[victim].at + STARVATION_SECONDS
        fared = serve(make(), jobs, until=end, awaited=victim, max_num_sequences=4)[victim]
        if fared.first_token_at < 0:
            return Finding(
                _FAIR,
                f"a long request of low priority had no token after {STARVATION_SECONDS:.0f} s, while "
                f"later ones were served (load '{kind}'); let waiting count for more than any number, as "
                "`priority` does with `max_wait` and `shortest_first` with `patience`",
            )
        longest = max(longest, fared.ttft)
    return Finding(_FAIR, measured=f"{longest:.1f} s at most")


_CONTRACTS: Mapping[str, tuple[Callable[..., None], str]] = {
    "scheduling": (
        check_scheduling_policy,
        "orders are permutations, the same each time; victims are members; views are left alone",
    ),
    "eviction": (check_eviction_policy, "keys are numbers, the same each time; blocks left alone"),
    "routing": (check_routing_policy, "every answer is a replica that was offered"),
    "admission": (check_admission_policy, "every verdict is complete, at both stages"),
    "quantization": (check_quantization_policy, "schemes and parts say what they are"),
}
KINDS: Sequence[str] = tuple(_CONTRACTS)
