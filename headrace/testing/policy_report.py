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

from headrace.policy_guard import GuardLimits
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise: what it is, and how it is broken; "" where it is kept."""

    promise: str
    breach: str = ""
    measured: str = ""


def examine(kind: str, make: Callable[[], Any]) -> list[Finding]:
    """Return what was found of a policy of this kind; `make` builds a fresh one each time."""
    check, promise = _CONTRACTS[kind]
    findings = [_contract(check, make, promise)]
    if kind == "scheduling" and not findings[0].breach:
        findings += [_time_per_call(make), _starvation(make)]
    return findings


def _contract(check: Callable[..., None], make: Callable[[], Any], promise: str) -> Finding:
    for seed in range(5):
        try:
            check(make, seed=seed)
        except AssertionError as error:
            return Finding(promise, str(error))
    return Finding(promise)


def _time_per_call(make: Callable[[], Any]) -> Finding:
    limit = GuardLimits().slow_seconds
    promise = f"a queue of {_QUEUE_LENGTH:,} is ranked well within {limit * 1000:.0f} ms"
    rng = random.Random(0)
    waiting = [
        RequestView(
            f"request-{number}",
            tenant=f"tenant-{number % 20}",
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
        policy.rank_waiting(list(waiting), view)
        times.append(time.perf_counter() - start)
    best = min(times)
    measured = f"{best * 1000:.2f} ms"
    if best > limit / 2:
        return Finding(promise, f"it takes {measured}; longer calls are cut off", measured)
    return Finding(promise, measured=measured)


def adversarial_load(kind: str) -> tuple[list[Job], int]:
    """Return more load than can be served, and which job it is aimed at.

    "urgent": every other request is shorter and of higher priority. "crowd": many tenants, each
    with a first request. Both go on longer than STARVATION_SECONDS.
    """
    times = [0.18 * number for number in range(int((STARVATION_SECONDS + 20.0) / 0.18))]
    if kind == "urgent":
        jobs = [Job(at, 2000, 4, priority=-1, ttft_target_seconds=2.0) for at in times]
        victim = Job(5.0, 6000, 4, priority=1, ttft_target_seconds=2.0)
    else:
        jobs = [Job(at, 2000, 4, tenant=f"tenant-{number}") for number, at in enumerate(times)]
        victim = Job(5.0, 6000, 4, tenant="old")
    jobs.append(victim)
    return jobs, len(jobs) - 1


def _starvation(make: Callable[[], Any]) -> Finding:
    promise = f"nobody waits longer than {STARVATION_SECONDS:.0f} s under a load that never ends"
    longest = 0.0
    for kind in ("urgent", "crowd"):
        jobs, victim = adversarial_load(kind)
        end = jobs[victim].at + STARVATION_SECONDS
        fared = serve(make(), jobs, until=end, awaited=victim, max_num_sequences=4)[victim]
        if fared.first_token_at < 0:
            return Finding(
                promise,
                f"a long request of low priority had no token after {STARVATION_SECONDS:.0f} s, while "
                f"later ones were served (load '{kind}'); let waiting count, as `priority` does "
                "with `ageing` and `shortest_first` with `patience`",
            )
        longest = max(longest, fared.ttft)
    return Finding(promise, measured=f"{longest:.1f} s at most")


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
