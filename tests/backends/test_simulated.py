"""The simulated backend: steps cost what the formula says and repeat exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.simulated.backend import SimulatedBackend
from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.clock import SystemClock
from headrace.interfaces import Backend, Clock, RepeatingRunner, Runner
from headrace.step_time import StepTimeFormula
from headrace.testing.clock import FakeClock
from headrace.types import EngineSettings, ForwardBatch, KVGroupSpec, RunBatch, StepResult

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


def decodes(token_ids: list[int], position: int, sources: list[int] | None = None) -> ForwardBatch:
    """Return a step of two decodes at a position; `sources` name rows of the step before."""
    sequences = [
        SequenceStep([token_id], position, [2 * row, 2 * row + 1], [0])
        for row, token_id in enumerate(token_ids)
    ]
    batch = forward_batch(sequences, block_size=16, num_groups=1)
    positions = np.full(len(token_ids), position + 1, np.int64)
    batch = replace(batch, sampling=replace(batch.sampling, positions=positions))
    if sources is None:
        return batch
    return replace(batch, token_sources=np.array(sources, np.int32))


def test_a_step_launched_ahead_begins_when_the_one_before_is_done() -> None:
    clock = FakeClock(10.0)
    runner = make_runner(clock, StepTimeFormula(1.0))
    first, second = runner.execute(decodes([5, 6], 3)), runner.execute(decodes([7, 8], 4))
    for handle in (first, second):
        handle.sample()
    assert clock.now() == 10.0
    first.result()
    assert clock.now() == 11.0
    clock.advance(0.25)  # the host does something else
    second.result()
    assert clock.now() == 12.0


def test_a_named_row_is_what_the_step_before_drew() -> None:
    class Echoing(SimulatedRunner):
        def contexts(self, batch: ForwardBatch) -> NDArray[np.uint64]:
            return batch.token_ids[batch.sample_rows].astype(np.uint64)

    def make() -> SimulatedRunner:
        return Echoing(
            groups=GROUPS,
            vocab_size=1000,
            settings=SETTINGS,
            clock=FakeClock(),
            device=SimulatedDevice(StepTimeFormula(0.5)),
        )

    ahead, waiting = make(), make()
    first = waiting.execute(decodes([5, 6], 3))
    first.sample()
    drawn = first.result().token_ids.tolist()
    assert drawn[0] != drawn[1]
    expected = waiting.execute(decodes([drawn[1], drawn[0]], 4))
    ahead.execute(decodes([5, 6], 3))
    named = ahead.execute(decodes([0, 0], 4, sources=[1, 0]))
    for handle in (expected, named):
        handle.sample()
    assert named.result().token_ids.tolist() == expected.result().token_ids.tolist()


def repeated_decodes(num_sequences: int, num_computed: int) -> RunBatch:
    """Return what `decodes` says, without its arrays of rows."""
    batch = decodes([1] * num_sequences, num_computed)
    seeds = np.where(batch.sampling.temperature > 0, batch.sampling.seeds, np.uint64(0))
    return RunBatch(
        num_prefill_tokens=0,
        num_sequences=num_sequences,
        num_kv_rows=int(batch.kv_lens[0].sum()),
        seeds=seeds.tolist(),
        positions=batch.sampling.positions.tolist(),
    )


def test_repeated_steps_are_those_one_by_one() -> None:
    formula = StepTimeFormula(0.01, 0.1, 0.002, 1e-4)
    single, repeated = FakeClock(1.0), FakeClock(1.0)
    runner = make_runner(single, formula)
    tokens, times = [], []
    for step in range(6):
        handle = runner.execute(decodes([1, 2], 20 + step))
        handle.sample()
        tokens.append(handle.result().token_ids.tolist())
        times.append(single.now())
    other = cast(RepeatingRunner, make_runner(repeated, formula))
    assert other.can_repeat
    batch = repeated_decodes(2, 20)
    run = other.repeat(batch, 6, float("inf"))
    assert ([list(step) for step in zip(*run.token_ids, strict=True)], run.times) == (tokens, times)
    early = cast(RepeatingRunner, make_runner(FakeClock(1.0), formula))
    assert early.repeat(batch, 6, times[2]).times == times[:3]
    assert len(early.repeat(repeated_decodes(2, 23), 6, 0.0).times) == 1


def test_real_time_is_not_run_through() -> None:
    assert not cast(RepeatingRunner, make_runner(SystemClock())).can_repeat
