"""A scheduling policy at work in virtual time: jobs in, when each was served out.

The real engine, scheduler and KV cache run on the simulated device, so an hour of load takes a moment
and comes out the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.interfaces import SchedulingPolicy
from headrace.step_time import StepTimeFormula
from headrace.testing.clock import FakeClock
from headrace.testing.engine_driver import DRIVER_GROUPS, EOS_TOKEN_ID, driver_tokenizer
from headrace.types import EngineSettings, GenerationRequest, SamplingParams

TRIAL_STEP_TIME = StepTimeFormula(0.001, 1e-4, 1e-4, 1e-7)
"""A prompt token takes 0.1 ms, a step 1 ms, a sequence in it 0.1 ms."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to be made at a time, in seconds."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int = 8
    tenant: str = ""
    priority: int = 0
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
    prefix: int = 0
    """Jobs of the same prefix, other than 0, begin with the same tokens: half of the shorter prompt."""


@dataclass(slots=True)
class Served:
    """How a job fared, in seconds since the trial began."""

    job: Job
    first_token_at: float = -1.0
    finished_at: float = -1.0
    output_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.job.at

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        steps = max(1, self.job.num_output_tokens - 1)
        return (self.finished_at - self.first_token_at) / steps


def serve(
    policy: SchedulingPolicy,
    jobs: Sequence[Job],
    *,
    num_blocks: int = 4096,
    until: float = float("inf"),
    awaited: int = -1,
    on_step: Callable[[Engine, float], object] = lambda engine, now: None,
    **settings: Any,
) -> list[Served]:
    """Serve `jobs` under `policy` and return how each fared, in their order.

    It ends when all are served, at `until`, or when job number `awaited` has its first token: then
    times that did not come are -1. `settings` are fields of EngineSettings. `on_step` is told the engine and
    the time after each step.
    """
    engine_settings = EngineSettings(
        **{
            "block_size": 16,
            "max_model_len": 8192,
            "max_num_sequences": 8,
            "max_queued_requests": 1 << 20,
            **settings,
        }
    )
    engine, clock = _engine(policy, engine_settings, num_blocks)
    served = {f"job-{number}": Served(job) for number, job in enumerate(jobs)}
    to_come = sorted(served, key=lambda name: served[name].job.at, reverse=True)
    last = served.get(f"job-{awaited}", Served(jobs[0]))
    while (to_come or engine.has_work()) and clock.now() < until and last.first_token_at < 0:
        if not engine.has_work():
            clock.set(max(clock.now(), served[to_come[-1]].job.at))
        while to_come and served[to_come[-1]].job.at <= clock.now():
            name = to_come.pop()
            engine.submit(_request(name, served[name].job))
        for event in engine.step():
            entry = served[event.request_id]
            if event.token_ids and entry.first_token_at < 0:
                entry.first_token_at = clock.now()
            entry.output_times += [clock.now()] * len(event.token_ids)
            if event.finish_reason is not None:
                entry.finished_at = clock.now()
        on_step(engine, clock.now())
    engine.close()
    return list(served.values())


def _engine(
    policy: SchedulingPolicy, settings: EngineSettings, num_blocks: int
) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    tokenizer = driver_tokenizer()
    runner = SimulatedRunner(
        groups=DRIVER_GROUPS,
        vocab_size=tokenizer.vocab_size,
        settings=settings,
        clock=clock,
        device=SimulatedDevice(TRIAL_STEP_TIME),
    )
    runner.allocate(num_blocks)
    engine = Engine(
        runner,
        model=ServedModel("m", "revision", tokenizer, (EOS_TOKEN_ID,), tokenizer.vocab_size),
        settings=settings,
        num_blocks=num_blocks,
        policy=policy,
        clock=clock,
    )
    return engine, clock


def _request(name: str, job: Job) -> GenerationRequest:
    tokens = _tokens(name, job.num_prompt_tokens)
    if job.prefix:
        shared = _tokens(f"prefix-{job.prefix}", job.num_prompt_tokens // 2)
        tokens[: len(shared)] = shared
    return GenerationRequest(
        request_id=name,
        model="m",
        prompt_token_ids=tokens,
        sampling=SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=job.num_output_tokens),
        tenant=job.tenant,
        priority=job.priority,
        ttft_target_seconds=job.ttft_target_seconds,
        tpot_target_seconds=job.tpot_target_seconds,
    )


def _tokens(seed: str, length: int) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(1, 300) for _ in range(length)]
