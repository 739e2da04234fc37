"""An engine over the shadow runner in virtual time, and a driver that collects what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from headrace.backends.simulated.runner import SimulatedDevice
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.interfaces import SchedulingPolicy
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

GROUPS = (
    KVGroupSpec(name="full", layers=(0, 2), num_kv_heads=1, head_dim=4),
    KVGroupSpec(name="window", layers=(1,), num_kv_heads=1, head_dim=4, sliding_window=8),
)
STEP_TIME = StepTimeFormula(0.001, 1e-4, 1e-4, 1e-7)
EOS = 0


@dataclass
class Driver:
    """An engine with its clock and runner, and all events by (request, choice)."""

    engine: Engine
    runner: ShadowRunner
    clock: FakeClock
    events: dict[tuple[str, int], list[TokenEvent]] = field(default_factory=dict)
    next_id: int = 0

    def submit(self, prompt: list[int], *, request_id: str | None = None, **options: object) -> str:
        self.next_id += 1
        name = request_id or f"r{self.next_id}"
        outer = {
            key: options.pop(key)
            for key in ("priority", "tenant", "cache_salt", "tpot_target_seconds")
            if key in options
        }
        options.setdefault("ignore_eos", True)
        options.setdefault("temperature", 0.0)
        request = GenerationRequest(
            request_id=name,
            model="m",
            prompt_token_ids=prompt,
            sampling=SamplingParams(**options),  # type: ignore[arg-type]
            **outer,  # type: ignore[arg-type]
        )
        self.engine.submit(request)
        return name

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            self.events.setdefault((event.request_id, event.index), []).append(event)
        return events

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.stats()}")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for event in self.events[request_id, index] for t in event.token_ids]

    def last(self, request_id: str, index: int = 0) -> TokenEvent:
        return self.events[request_id, index][-1]

    def generate(self, prompt: list[int], **options: object) -> list[int]:
        name = self.submit(prompt, **options)
        self.run()
        return self.tokens(name)

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert not self.engine.has_work()


MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False
    )


@pytest.fixture
def make_driver(tiny_tokenizer: Tokenizer) -> Iterator[MakeDriver]:
    drivers: list[Driver] = []

    def make(
        num_blocks: int = 64, *, policy: SchedulingPolicy | None = None, **settings: object
    ) -> Driver:
        options = {"block_size": 16, "max_model_len": 512, "max_num_sequences": 8, **settings}
        engine_settings = EngineSettings(**options)  # type: ignore[arg-type]
        clock = FakeClock()
        runner = ShadowRunner(
            groups=GROUPS,
            vocab_size=tiny_tokenizer.vocab_size,
            settings=engine_settings,
            clock=clock,
            device=SimulatedDevice(STEP_TIME),
        )
        runner.allocate(num_blocks)
        engine = Engine(
            runner,
            model=ServedModel("m", "r1", tiny_tokenizer, (EOS,), tiny_tokenizer.vocab_size),
            settings=engine_settings,
            num_blocks=num_blocks,
            policy=policy or FirstComeFirstServed(),
            clock=clock,
        )
        drivers.append(Driver(engine, runner, clock))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()
