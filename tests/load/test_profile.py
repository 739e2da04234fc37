"""A profile's shapes fit the engine, and its coefficients are those of the steps measured."""

from __future__ import annotations

import dataclasses
import os

import pytest

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.clock import SystemClock
from headrace.load.overheads import (
    Sample,
    core_seconds,
    engine_seconds,
    first_chunk,
    shortest_decode,
)
from headrace.load.profile import fit, mean_relative_error, measure_steps, step_shapes
from headrace.step_time import StepTimeFormula
from headrace.types import EngineSettings, KVGroupSpec

SHAPES = [(0, n, n * context) for n in (1, 4, 16) for context in (64, 512)]
SHAPES += [(chunk, 1, chunk + before) for chunk in (16, 128) for before in (0, 512)]


def samples_of(formula: StepTimeFormula) -> list[Sample]:
    return [
        {"prefill_tokens": p, "sequences": s, "kv_rows": k, "seconds": formula.seconds(p, s, k)}
        for p, s, k in SHAPES
    ]


def test_the_fit_finds_the_formula_that_made_the_samples() -> None:
    made = StepTimeFormula(2e-3, 3e-4, 2e-4, 3e-8)
    found = fit(samples_of(made))
    for field in dataclasses.fields(made):
        expected = pytest.approx(getattr(made, field.name), rel=1e-6)
        assert getattr(found, field.name) == expected, field.name
    assert mean_relative_error(found, samples_of(made)) < 1e-6


def test_no_coefficient_is_negative() -> None:
    samples = samples_of(StepTimeFormula(5e-3, 3e-4, 2e-4, 0.0))
    for sample in samples:
        sample["seconds"] -= 1e-7 * sample["kv_rows"]
    found = fit(samples)
    assert found.seconds_per_kv_row == 0 and found.seconds_per_prefill_token > 0
    assert mean_relative_error(found, samples) < 0.1


def test_every_shape_fits_the_pool_and_the_settings() -> None:
    settings = EngineSettings(max_model_len=600, max_num_sequences=4, max_batched_tokens=130)
    shapes = list(step_shapes(settings, 40))
    assert len(shapes) > 5
    for steps in shapes:
        blocks = [block for step in steps for block in step.block_ids]
        assert len(set(blocks)) == len(blocks) and max(blocks) < 40
        assert len(steps) <= 4 and sum(len(step.token_ids) for step in steps) <= 130
        for step in steps:
            rows = step.num_computed + len(step.token_ids)
            assert rows <= min(600, 16 * len(step.block_ids))


def test_steps_are_told_apart_as_the_engine_does() -> None:
    settings = EngineSettings(max_model_len=600, max_num_sequences=8, max_batched_tokens=130)
    runner = SimulatedRunner(
        groups=(KVGroupSpec(name="all", layers=(0,), num_kv_heads=1, head_dim=16),),
        vocab_size=100,
        settings=settings,
        clock=SystemClock(),
        device=SimulatedDevice(StepTimeFormula()),
    )
    runner.allocate(64)
    told: list[float] = []
    samples = measure_steps(runner, settings, 64, lambda stage, fraction: told.append(fraction))
    keys = {(s["prefill_tokens"], s["sequences"], s["kv_rows"]) for s in samples}
    assert (0, 4, 4 * 65) in keys and (64, 1, 64 + 512) in keys and (128, 1, 128) in keys
    assert all(sample["seconds"] > 0 for sample in samples) and told == sorted(told)


def test_the_engines_part_of_a_step_and_a_process_own_time_are_seen() -> None:
    assert engine_seconds(2) > 0
    before = core_seconds(os.getpid())
    assert before is None or before > 0
    assert core_seconds(2**31 - 1) is None


def test_serving_is_compared_with_the_decode_of_fewest_rows() -> None:
    def sample(tokens: int, sequences: int, rows: int, seconds: float) -> dict[str, float]:
        counts = {"prefill_tokens": tokens, "sequences": sequences, "kv_rows": rows}
        return {**counts, "seconds": seconds}

    samples = [
        sample(0, 1, 513, 0.005),
        sample(0, 1, 65, 0.004),
        sample(16, 1, 16, 0.02),
        sample(0, 2, 8, 0.003),
    ]
    assert shortest_decode(samples, 1)["seconds"] == 0.004
    assert shortest_decode(samples, 8)["seconds"] == 0.003, "of as many as were measured"


def test_a_first_chunk_is_between_those_measured_or_unknown() -> None:
    samples = [
        {"prefill_tokens": size, "sequences": 1, "kv_rows": size + done, "seconds": seconds}
        for size, done, seconds in ((16, 0, 1.0), (32, 0, 3.0), (16, 512, 9.0))
    ]
    assert first_chunk(samples, 24) == 2.0
    assert first_chunk(samples[2:], 24) is None, "a budget too small for any chunk that is measured"
