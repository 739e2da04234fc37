"""The prompt tokens of a step follow the TPOT target, by step times the engine has learnt itself."""

from __future__ import annotations

import statistics

import pytest

from headrace.interfaces import SchedulingPolicy
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policies.scheduling.slo import LatencyTargets
from headrace.step_time import StepTimeFormula
from headrace.testing import policy_trial
from headrace.testing.policy_trial import TRIAL_STEP_TIME, Job, Served, serve
from headrace.types import StepFacts

SLOWER = StepTimeFormula(0.002, 3e-4, 2e-4, 2e-7)
BUDGET = 512


class Steps:
    """Notes the steps in which a stream got a token and prompts got some: their chunk and length."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.seconds: list[float] = []

    def observe(self, step: StepFacts) -> None:
        if "job-0" in step.tokens and len(step.tokens) > 1:
            self.chunks.append(sum(step.tokens.values()) - step.tokens["job-0"])
            self.seconds.append(step.step_seconds)


class WatchedFirstCome(Steps, FirstComeFirstServed):
    pass


class WatchedTargets(Steps, LatencyTargets):
    def __init__(self) -> None:
        Steps.__init__(self)
        LatencyTargets.__init__(self)


def stream_beside_prompts(policy: SchedulingPolicy, target: float | None) -> Served:
    """Return how a stream fared beside long prompts; what came before taught the engine its device."""
    stream = Job(20.0, 64, 150, tpot_target_seconds=target)
    lessons = [Job(0.3 * number, 50 + 130 * (number % 9), 20) for number in range(30)]
    prompts = [Job(20.02, 4000, 1, ttft_target_seconds=1000.0) for _ in range(6)]
    return serve(policy, [stream, *lessons, *prompts], max_batched_tokens=BUDGET)[0]


@pytest.mark.parametrize("device", [TRIAL_STEP_TIME, SLOWER], ids=["fast", "slow"])
@pytest.mark.parametrize("target", [0.010, 0.020, 0.030])
def test_chunks_are_what_the_target_leaves_room_for(
    monkeypatch: pytest.MonkeyPatch, device: StepTimeFormula, target: float
) -> None:
    monkeypatch.setattr(policy_trial, "TRIAL_STEP_TIME", device)
    policy = WatchedFirstCome()
    stream_beside_prompts(policy, target)
    room = device.prefill_tokens_within(target, 1, 150, BUDGET)
    assert room < BUDGET, "the target has to matter"
    assert statistics.median(policy.chunks) == pytest.approx(room, rel=0.1)
    assert 0.9 * target <= statistics.median(policy.seconds)
    assert max(policy.seconds) <= 1.1 * target


def test_without_a_target_a_step_takes_all_it_may() -> None:
    policy = WatchedFirstCome()
    stream_beside_prompts(policy, None)
    assert statistics.median(policy.chunks) == BUDGET - 1
    assert max(policy.seconds) > 0.05


@pytest.mark.parametrize("target", [0.010, 0.020])
def test_slo_spends_the_slack_that_a_stream_has_saved_and_no_more(target: float) -> None:
    policy = WatchedTargets()
    stream = stream_beside_prompts(policy, target)
    assert 0.8 * target <= stream.tpot <= 1.01 * target
    assert max(policy.chunks) > TRIAL_STEP_TIME.prefill_tokens_within(target, 1, 150, BUDGET)
