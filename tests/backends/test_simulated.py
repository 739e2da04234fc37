"""The simulated backend: steps cost what the formula says and repeat exactly."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.simulated.backend import SimulatedBackend
from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.clock import SystemClock
from headrace.interfaces import Backend, Clock, Runner
from headrace.step_time import StepTimeFormula
from headrace.testing.clock import FakeClock
from headrace.types import EngineSettings, ForwardBatch, KVGroupSpec, StepResult

GROUPS = (KVGroupSpec(name="full", layers=(0, 1, 2), num_kv_heads=2, head_dim=64),)
SETTINGS = EngineSettings(kv_dtype="bfloat16")


def make_runner(clock: Clock, formula: StepTimeFormula = StepTimeFormula(0.5)) -> Runner:  # noqa: B008
    return SimulatedRunner(
        groups=GROUPS,
        vocab_size=1000,
        settings=SETTINGS,
        clock=clock,
        device=SimulatedDevice(formula, weight_bytes=100, memory_bytes=1 << 20),
    )


def batch() -> ForwardBatch:
    decode = SequenceStep([7], 20, [0, 1], [0])
    prompt = SequenceStep(list(range(12)), 0, [2], [11])
    return forward_batch([decode, prompt], block_size=16, num_groups=1)


def run(runner: Runner) -> StepResult:
    handle = runner.execute(batch())
    handle.sample()
    return handle.result()


def test_a_step_takes_virtual_time_by_the_formula() -> None:
    clock = FakeClock(10.0)
    run(make_runner(clock, StepTimeFormula(1.0, 0.1, 0.01, 0.001)))
    assert clock.now() == pytest.approx(10 + 1 + 12 * 0.1 + 2 * 0.01 + (21 + 12) * 0.001)


def test_a_step_on_a_real_clock_waits() -> None:
    clock = SystemClock()
    before = clock.now()
    run(make_runner(clock, StepTimeFormula(0.02)))
    assert clock.now() - before >= 0.02


def test_runs_repeat() -> None:
    first, second = run(make_runner(FakeClock())), run(make_runner(FakeClock()))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert first.token_ids.min() >= 0
    assert first.token_ids.max() < 1000
    assert not first.failed.any()


def test_memory_is_that_of_the_groups() -> None:
    runner = make_runner(FakeClock())
    per_block = 2 * 3 * 2 * 64 * 2 * 16
    assert runner.memory().kv_bytes_per_block == per_block
    runner.allocate(10)
    report = runner.memory()
    assert report.kv_pool_bytes == 10 * per_block
    assert report.available_bytes == (1 << 20) - 100 - 10 * per_block


def test_the_backend_keeps_its_contract() -> None:
    assert SimulatedBackend.probe().ok
    backend: Backend = SimulatedBackend.open(0, SimulatedBackend.Options(), FakeClock())
    assert backend.name == "simulated"


def test_a_clock_never_goes_back() -> None:
    clock = FakeClock(5)
    clock.set(7)
    clock.advance(0)
    assert clock.now() == 7
    with pytest.raises(ValueError, match="never goes back"):
        clock.set(6)
