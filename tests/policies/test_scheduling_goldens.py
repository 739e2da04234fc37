"""What each scheduling policy promises, seen in virtual time on the real scheduler."""

from __future__ import annotations

import dataclasses
import random
import statistics
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.interfaces import SchedulingPolicy
from headrace.policies.scheduling.deficit_prefix import DeficitPrefix
from headrace.policies.scheduling.fair_share import FairShare
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.policies.scheduling.shortest_first import ShortestFirst
from headrace.policies.scheduling.slo import LatencyTargets
from headrace.policy_guard import SchedulingGuard
from headrace.testing.policy_trial import TRIAL_STEP_TIME, Job, Served, serve
from headrace.types import RequestView, SchedulerView
from headrace.types.views import set_fact


def mean_ttft(served: list[Served], tenant: str) -> float:
    return statistics.fmean(entry.ttft for entry in served if entry.job.tenant == tenant)


# --- fair_share -------------------------------------------------------------------


def one_sends_ten_times_as_much() -> list[Job]:
    heavy = [Job(0.02 * number, 200, 16, tenant="heavy") for number in range(300)]
    light = [Job(0.2 * number, 200, 16, tenant="light") for number in range(30)]
    return heavy + light


class Watched(FairShare):
    """Notes what the tenants had been given at each step."""

    def __init__(self, options: FairShare.Options | None = None) -> None:
        super().__init__(options)
        self.seen: list[tuple[float, dict[str, int]]] = []

    def prefill_budget(self, view: SchedulerView) -> int:
        weighted = {
            name: service.input_tokens + 2 * service.output_tokens
            for name, service in view.tenants.items()
        }
        self.seen.append((view.now, weighted))
        return super().prefill_budget(view)


def test_a_tenant_that_sends_ten_times_as_much_holds_up_nobody() -> None:
    jobs = one_sends_ten_times_as_much()
    fcfs, fair = serve(FirstComeFirstServed(), jobs), serve(FairShare(), jobs)
    assert mean_ttft(fair, "light") < 0.1 * mean_ttft(fcfs, "light")
    assert mean_ttft(fair, "heavy") < 1.2 * mean_ttft(fcfs, "heavy")
    assert max(e.finished_at for e in fair) == pytest.approx(max(e.finished_at for e in fcfs))


def test_a_backlogged_tenant_keeps_its_share_beside_one_that_sends_ten_times_as_much() -> None:
    heavy = [Job(0.0, 200, 16, tenant="heavy") for _ in range(400)]
    light = [Job(0.0, 200, 16, tenant="light") for _ in range(40)]
    policy = Watched()
    served = serve(policy, heavy + light)
    end = max(entry.first_token_at for entry in served if entry.job.tenant == "light")
    given = max(entry for entry in policy.seen if entry[0] <= end)[1]
    assert given["heavy"] < 1.1 * given["light"]


@pytest.mark.parametrize("seed", range(2))
def test_the_service_of_two_backlogged_tenants_differs_by_a_constant(seed: int) -> None:
    """The bound of the paper: twice the larger of w_in x longest prompt and w_out x tokens at once."""
    rng = random.Random(seed)
    longest, most_running = 512, 8 * (512 + 64)
    jobs = [Job(0.0, rng.randint(300, longest), rng.randint(1, 8), tenant="a") for _ in range(160)]
    jobs += [Job(0.0, rng.randint(1, 40), rng.randint(16, 64), tenant="b") for _ in range(450)]
    policy = Watched()
    served = serve(policy, jobs)
    both_wait_until = min(
        max(entry.first_token_at for entry in served if entry.job.tenant == tenant)
        for tenant in "ab"
    )
    backlogged = [given for now, given in policy.seen if now < both_wait_until and len(given) == 2]
    assert len(backlogged) > 300
    most = max(abs(given["a"] - given["b"]) for given in backlogged)
    assert most <= 2 * max(longest, 2 * most_running)
    assert most < 0.15 * backlogged[-1]["a"], "it does not grow with what was served"


def test_a_tenant_that_comes_back_has_saved_up_no_claim() -> None:
    early = [Job(0.0, 100, 4, tenant="returning")]
    steady = [Job(0.05 * number, 400, 8, tenant="steady") for number in range(400)]
    back = [Job(10.0, 400, 8, tenant="returning") for _ in range(50)]
    served = serve(FairShare(), early + steady + back)
    first_served = sorted(
        (e for e in served if e.first_token_at > 10.5), key=lambda e: e.first_token_at
    )
    tenants = [entry.job.tenant for entry in first_served[:40]]
    assert 15 <= tenants.count("steady") <= 25


def test_a_policy_swapped_in_late_starts_everybody_level() -> None:
    guard = SchedulingGuard(FirstComeFirstServed(), FirstComeFirstServed())

    def swap_once(engine: Engine, now: float) -> None:
        if now >= 3.0 and guard.policy.name == "fcfs":
            guard.swap(FairShare())

    jobs = [Job(0.0, 300, 8, tenant="a") for _ in range(80)]
    jobs += [Job(3.0, 200, 8, tenant=tenant) for _ in range(60) for tenant in "ab"]
    served = [e for e in serve(guard, jobs, on_step=swap_once) if e.job.at == 3.0]
    half = sorted(served, key=lambda entry: entry.first_token_at)[: len(served) // 2]
    assert 20 <= sum(entry.job.tenant == "a" for entry in half) <= 40


# --- deficit_prefix ---------------------------------------------------------------


def shared_prefixes() -> list[Job]:
    rng = random.Random(7)
    return [
        Job(0.01 * number, 640, 8, tenant="ab"[number % 2], prefix=1 + rng.randrange(12))
        for number in range(240)
    ]


def test_keeping_prefixes_together_serves_sooner_with_a_small_pool() -> None:
    def end(policy: SchedulingPolicy) -> float:
        served = serve(policy, shared_prefixes(), num_blocks=260, max_num_sequences=4)
        return max(entry.finished_at for entry in served)

    assert end(DeficitPrefix()) < 0.85 * end(FirstComeFirstServed())


def test_local_and_fair_too() -> None:
    jobs = [Job(0.0, 640, 8, tenant="heavy", prefix=1) for _ in range(160)]
    jobs += [Job(0.0, 640, 8, tenant="light", prefix=2 + number) for number in range(16)]
    served = serve(DeficitPrefix(), jobs)
    half_time = max(entry.finished_at for entry in served) / 2
    light = [entry for entry in served if entry.job.tenant == "light"]
    assert all(entry.finished_at < half_time for entry in light)


def in_passes(queue: list[RequestView], left: dict[str, float], quantum: int) -> list[RequestView]:
    """Return the order of deficit round robin as it is told: pass after pass over all who wait."""
    order: list[RequestView] = []
    while queue:
        passed: list[RequestView] = []
        for request in queue:
            if left[request.tenant] > 0:
                left[request.tenant] -= max(
                    1, request.num_prompt_tokens - request.num_cached_tokens
                )
                order.append(request)
            else:
                passed.append(request)
        queue = passed
        most = max((left[request.tenant] for request in queue), default=1)
        for tenant in {request.tenant for request in queue}:
            left[tenant] += (1 + int(-most // quantum)) * quantum
    return order


class Counted(list[RequestView]):
    num_looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("quantum", [1, 100, 4096])
@pytest.mark.parametrize("num_tenants", [1, 5, 200])
def test_rounds_are_those_of_the_paper_and_look_at_each_request_a_few_times_only(
    quantum: int, num_tenants: int
) -> None:
    """A pass over all who wait per round took 90 ms for a thousand long prompts of one tenant."""
    rng = random.Random(num_tenants)
    queue = Counted(
        RequestView(
            str(number),
            tenant=str(rng.randrange(num_tenants)),
            num_prompt_tokens=rng.randint(1, 5000),
            num_cached_tokens=rng.choice([0, 1, 64]),
        )
        for number in range(300)
    )
    left = {str(tenant): float(rng.randint(-9000, 9000)) for tenant in range(num_tenants)}
    order = DeficitPrefix(DeficitPrefix.Options(quantum=quantum))._in_rounds(queue, left)
    assert queue.num_looks <= 2 * len(queue)
    present = {request.tenant for request in queue}
    first = in_passes(list(queue), {tenant: left[tenant] for tenant in present}, quantum)
    assert [each.request_id for each in order] == [each.request_id for each in first]


# --- slo --------------------------------------------------------------------------


def burst() -> list[Job]:
    rng = random.Random(1)
    lengths = [rng.choice([100, 200, 400, 1600]) for _ in range(80)]
    return [Job(0.0, length, 8, ttft_target_seconds=2.0) for length in lengths]


def overload() -> list[Job]:
    rng = random.Random(1)
    jobs: list[Job] = []
    now = 0.0
    while now < 30:
        now += rng.expovariate(14)
        jobs.append(Job(now, rng.choice([200, 400, 800, 1600]), 8, ttft_target_seconds=1.0))
    return jobs


def most_in_time(jobs: list[Job], seconds: float) -> int:
    """No order serves more prompts in so many seconds, even if all were there from the start."""
    done, count = 0.0, 0
    for length in sorted(job.num_prompt_tokens for job in jobs):
        done += length * TRIAL_STEP_TIME.seconds_per_prefill_token
        count += done <= seconds
    return count


@pytest.mark.parametrize(("jobs", "seconds"), [(burst(), 2.0), (overload(), 31.0)])
def test_at_overload_nearly_all_that_can_be_are_inside_their_targets(
    jobs: list[Job], seconds: float
) -> None:
    def inside(policy: SchedulingPolicy) -> int:
        served = serve(policy, jobs, max_num_sequences=16)
        return sum(e.ttft <= (e.job.ttft_target_seconds or 0) and e.tpot <= 0.1 for e in served)

    feasible = most_in_time(jobs, seconds)
    assert inside(LatencyTargets()) >= 0.9 * feasible
    assert inside(FirstComeFirstServed()) < 0.5 * feasible


def test_the_chunk_follows_the_slack_of_the_tightest_decode() -> None:
    policy = LatencyTargets(LatencyTargets.Options(tpot=0.02, least_chunk=16))
    decoding = RequestView("d", first_token_time=1.0, num_output_tokens=1, num_computed_tokens=100)
    view = SchedulerView(
        1.0, 512, 1, 1, 10, 100, step_seconds=TRIAL_STEP_TIME.seconds, running=lambda: [decoding]
    )
    spare = 0.02 - TRIAL_STEP_TIME.seconds(0, 1, 100)
    assert policy.prefill_budget(view) == int(spare / 1e-4)
    set_fact(decoding, "tpot_target_seconds", 0.005)
    assert 16 < policy.prefill_budget(view) < int(spare / 1e-4)
    set_fact(view, "now", 5.0)
    assert policy.prefill_budget(view) == 16
    set_fact(view, "running", list)
    assert policy.prefill_budget(view) == 512


def test_decodes_stay_inside_their_target_beside_long_prompts() -> None:
    jobs = [Job(0.0, 64, 200, tenant="reader")]
    jobs += [Job(0.1 * number, 1500, 2) for number in range(20)]
    policy = LatencyTargets(LatencyTargets.Options(ttft=100.0, tpot=0.008))
    slow = serve(FirstComeFirstServed(), jobs)[0]
    fast = serve(policy, jobs)[0]
    assert slow.tpot > 0.012
    assert fast.tpot <= 0.0085


# --- priority, shortest_first -----------------------------------------------------


def test_low_priority_waits_for_a_bounded_time_only() -> None:
    urgent = [Job(0.02 * number, 200, 16, priority=0) for number in range(600)]
    low = Job(1.0, 200, 16, priority=3)
    ageing = PriorityFirst(PriorityFirst.Options(ageing=1.0))
    strict = PriorityFirst(PriorityFirst.Options(ageing=None, max_wait=None))
    assert serve(ageing, [low, *urgent])[0].ttft < 3 * 1.0 + 3.0
    assert serve(strict, [low, *urgent])[0].ttft > 11.0


def beside_the_most_urgent(seconds: float) -> list[Job]:
    """One low request beside more than can be served of a caller who claims the lowest number."""
    low = Job(5.0, 6000, 4, priority=1, ttft_target_seconds=2.0)
    urgent = Job(0.0, 3000, 4, priority=-1000, ttft_target_seconds=2.0, tpot_target_seconds=0.001)
    times = [0.2 * number for number in range(int(seconds / 0.2))]
    return [low, *[dataclasses.replace(urgent, at=at) for at in times]]


@pytest.mark.parametrize(
    "policy",
    [
        PriorityFirst(PriorityFirst.Options(max_wait=10.0)),
        PriorityFirst(PriorityFirst.Options(ageing=None, max_wait=10.0)),
        LatencyTargets(LatencyTargets.Options(patience=10.0)),
        ShortestFirst(ShortestFirst.Options(patience=10.0)),
    ],
    ids=["ageing", "strict", "slo", "shortest_first"],
)
def test_no_caller_chooses_how_long_others_wait(policy: SchedulingPolicy) -> None:
    """A priority of -1000 was worth eight hours of ageing."""
    jobs = beside_the_most_urgent(40.0)
    served = serve(policy, jobs, awaited=0, until=40.0, max_num_sequences=4)
    assert 10.0 < served[0].ttft < 10.0 + 3.0


@pytest.mark.parametrize(
    "policy",
    [
        PriorityFirst(PriorityFirst.Options(max_wait=None)),
        LatencyTargets(LatencyTargets.Options(patience=1e9)),
    ],
    ids=["ageing", "slo"],
)
def test_without_the_bound_that_load_starves_others(policy: SchedulingPolicy) -> None:
    jobs = beside_the_most_urgent(40.0)
    served = serve(policy, jobs, awaited=0, until=40.0, max_num_sequences=4)
    assert served[0].first_token_at < 0


def test_by_default_the_lowest_number_holds_nobody_up_for_longer_than_the_check_allows() -> None:
    jobs = beside_the_most_urgent(80.0)
    for policy in (PriorityFirst(), LatencyTargets()):
        served = serve(policy, jobs, awaited=0, until=80.0, max_num_sequences=4)
        assert 60.0 < served[0].ttft < 65.0


def test_who_has_waited_for_the_bound_goes_first_in_order_of_arrival() -> None:
    policy = PriorityFirst(PriorityFirst.Options(ageing=5.0, max_wait=20.0))
    facts = [("a", 3, 1.0), ("b", 9, 0.0), ("c", -1000, 20.5), ("d", 0, 15.0), ("e", 1, 14.0)]
    waiting = [RequestView(name, priority=p, arrival_time=at) for name, p, at in facts]
    orders = {}
    for now in (19.0, 20.0, 21.0):
        view = SchedulerView(now, 512, 0, 0, 10, 100)
        orders[now] = "".join(each.request_id for each in policy.rank_waiting(waiting, view))
        assert policy.next_decision_at(view) == {19.0: 20.0, 20.0: 21.0, 21.0: 34.0}[now]
    assert orders == {19.0: "cdaeb", 20.0: "bcdae", 21.0: "bacde"}
    victim = policy.choose_victim(waiting, SchedulerView(21.0, 512, 0, 0, 10, 100))
    assert victim.request_id == "e"


def test_urgent_requests_do_not_wait_behind_others() -> None:
    jobs = [Job(0.02 * n, 200, 16, priority=5 if n % 10 else 0) for n in range(400)]
    fcfs, priority = serve(FirstComeFirstServed(), jobs), serve(PriorityFirst(), jobs)

    def urgent(served: list[Served]) -> float:
        return statistics.fmean(entry.ttft for entry in served if entry.job.priority == 0)

    assert urgent(priority) < 0.2 * urgent(fcfs)


def test_the_median_wait_falls_and_the_longest_stays_bounded() -> None:
    rng = random.Random(3)
    jobs = [Job(0.03 * n, rng.choice([50, 100, 200, 2000]), 8) for n in range(300)]
    fcfs = serve(FirstComeFirstServed(), jobs)
    bounded = serve(ShortestFirst(ShortestFirst.Options(patience=5.0)), jobs)
    unbounded = serve(ShortestFirst(ShortestFirst.Options(patience=1e9)), jobs)

    def median(served: list[Served]) -> float:
        return statistics.median(entry.ttft for entry in served)

    def longest(served: list[Served]) -> float:
        return max(entry.ttft for entry in served)

    assert median(bounded) < 0.5 * median(fcfs)
    assert longest(bounded) <= longest(unbounded)
    assert longest(bounded) < longest(fcfs) + 5.0


def test_a_guard_changes_no_order() -> None:
    jobs = overload()[:100]
    plain = serve(LatencyTargets(), jobs)
    guarded = serve(SchedulingGuard(LatencyTargets(), FirstComeFirstServed()), jobs)
    assert [e.output_times for e in plain] == [e.output_times for e in guarded]
