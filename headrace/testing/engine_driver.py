"""An engine in virtual time over the shadow runner, and someone who submits, steps and listens.

Made for tests of scheduling policies and of the engine itself: a request takes no real time, and what
it generates depends on every KV row it can see, so that a memory fault changes the text.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.interfaces import EvictionPolicy, Runner, SchedulingPolicy
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.step_time import StepTimeFormula
from headrace.testing.clock import FakeClock
from headrace.testing.shadow_runner import ShadowRunner
from headrace.testing.tokenizers import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer
from headrace.types import (
    EngineSettings,
    GenerationRequest,
    KVGroupSpec,
    SamplingParams,
    TokenEvent,
)

EOS_TOKEN_ID = 0
DRIVER_STEP_TIME = StepTimeFormula(0.001, 1e-4, 1e-4, 1e-7)
DRIVER_GROUPS = (
    KVGroupSpec(name="full", layers=(0, 2), num_kv_heads=1, head_dim=4),
    KVGroupSpec(name="window", layers=(1,), num_kv_heads=1, head_dim=4, sliding_window=8),
)


@functools.cache
def driver_tokenizer() -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False
    )


@dataclass
class EngineDriver:
    """An engine with its clock and runner, and all events by (request, choice)."""

    engine: Engine
    runner: Any
    """A ShadowRunner, unless made for another one."""
    clock: FakeClock
    events: dict[tuple[str, int], list[TokenEvent]] = field(default_factory=dict)
    _num_submitted: int = 0

    def submit(
        self,
        prompt: list[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tpot_target_seconds: float | None = None,
        cache_ttl_seconds: float | None = None,
        **sampling: Any,
    ) -> str:
        """Submit a greedy request that ignores EOS, unless `sampling` says otherwise; return its id."""
        self._num_submitted += 1
        name = request_id or f"r{self._num_submitted}"
        self.engine.submit(
            GenerationRequest(
                request_id=name,
                model="m",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**{"ignore_eos": True, "temperature": 0.0, **sampling}),
                priority=priority,
                cache_salt=cache_salt,
                tpot_target_seconds=tpot_target_seconds,
                cache_ttl_seconds=cache_ttl_seconds,
            )
        )
        return name

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            self.events.setdefault((event.request_id, event.index), []).append(event)
        return events

    def run(self, max_steps: int = 20000) -> int:
        """Step until nothing is left to do; return the number of steps. Each step must run something."""
        for num_steps in range(max_steps):
            if not self.engine.has_work():
                return num_steps
            before = self.engine.stats().steps_total
            self.step()
            assert self.engine.stats().steps_total == before + 1, "a step ran nothing"
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.stats()}")

    def generate(self, prompt: list[int], **options: Any) -> list[int]:
        """Submit, run until nothing is left, and return the tokens of the first choice."""
        name = self.submit(prompt, **options)
        self.run()
        return self.tokens(name)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for event in self.events[request_id, index] for token in event.token_ids]

    def last(self, request_id: str, index: int = 0) -> TokenEvent:
        return self.events[request_id, index][-1]

    def assert_empty(self) -> None:
        """Check that nothing runs, waits or holds a block."""
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0), stats
        assert stats.num_free_blocks == stats.num_blocks, stats
        assert not self.engine.has_work()


def make_engine_driver(
    num_blocks: int = 64,
    *,
    policy: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
    runs_ahead: bool = False,
    **settings: Any,
) -> EngineDriver:
    """Return an engine with a pool of `num_blocks`; `settings` are fields of EngineSettings.

    `runs_ahead`: each step is planned and launched while the one before it runs.
    """
    engine_settings = EngineSettings(
        **{"block_size": 16, "max_model_len": 512, "max_num_sequences": 8, **settings}
    )
    clock = FakeClock()
    tokenizer = driver_tokenizer()
    runner = ShadowRunner(
        groups=DRIVER_GROUPS,
        vocab_size=tokenizer.vocab_size,
        settings=engine_settings,
        clock=clock,
        device=SimulatedDevice(DRIVER_STEP_TIME, runs_ahead=runs_ahead),
    )
    runner.allocate(num_blocks)
    engine = Engine(
        runner,
        model=ServedModel("m", "revision", tokenizer, (EOS_TOKEN_ID,), tokenizer.vocab_size),
        settings=engine_settings,
        num_blocks=num_blocks,
        policy=policy or FirstComeFirstServed(),
        eviction=eviction,
        clock=clock,
    )
    return EngineDriver(engine, runner, clock)


def make_simulation(
    num_blocks: int = 64, *, policy: SchedulingPolicy | None = None, **settings: Any
) -> EngineDriver:
    """Return an engine as a simulation has it: made-up tokens, no text, runs of equal steps as one."""
    engine_settings = EngineSettings(
        **{"block_size": 16, "max_model_len": 512, "max_num_sequences": 8, **settings}
    )
    clock = FakeClock()
    runner = SimulatedRunner(
        groups=DRIVER_GROUPS,
        vocab_size=1000,
        settings=engine_settings,
        clock=clock,
        device=SimulatedDevice(DRIVER_STEP_TIME),
    )
    runner.allocate(num_blocks)
    engine = Engine(
        runner,
        model=ServedModel("m", "revision", None, (EOS_TOKEN_ID,), 1000),
        settings=engine_settings,
        num_blocks=num_blocks,
        policy=policy or FirstComeFirstServed(),
        clock=clock,
    )
    return EngineDriver(engine, runner, clock)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids that repeat from run to run and differ by length and seed."""
    choice = random.Random(f"{length} {seed}")
    return [choice.randrange(1, 300) for _ in range(length)]


def generate_alone(prompt: list[int], **options: Any) -> list[int]:
    """Return what a request generates in an empty engine with room for everything, nothing cached."""
    driver = make_engine_driver(64, max_model_len=1024, prefix_caching=False)
    return driver.generate(prompt, **options)


def drive_runner(
    runner: Runner, settings: EngineSettings, num_blocks: int, vocab_size: int
) -> EngineDriver:
    """Return an engine over a real runner, whose pool this allocates. Its clock stands still."""
    runner.allocate(num_blocks)
    clock = FakeClock()
    engine = Engine(
        runner,
        model=ServedModel("m", "revision", driver_tokenizer(), (EOS_TOKEN_ID,), vocab_size),
        settings=settings,
        num_blocks=num_blocks,
        policy=FirstComeFirstServed(),
        clock=clock,
    )
    return EngineDriver(engine, runner, clock)
