"""A profile's shapes fit the engine, and its coefficients are those of the steps measured."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.clock import SystemClock
from headrace.config import load_config, parse_assignments
from headrace.load.overheads import core_seconds, engine_seconds
from headrace.load.plan import LoadPlan
from headrace.load.profile import Sample, fit, mean_relative_error, measure_steps, step_shapes
from headrace.load.recording import (
    RecordedStep,
    RecordingFcfs,
    gaps_between_decodes,
    read_steps,
    seconds_until_seen,
    with_recording,
)
from headrace.load.report import LoadReport, RequestOutcome
from headrace.step_time import StepTimeFormula
from headrace.types import EngineSettings, KVGroupSpec, RequestView, SchedulerView, StepFacts

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


def test_a_recorded_step_says_what_it_computed(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    policy = RecordingFcfs(RecordingFcfs.Options(str(file)))
    view = SchedulerView(0.0, 512, 0, 0, 10, 10)
    policy.rank_waiting([RequestView("a", num_prompt_tokens=40, num_cached_tokens=16)], view)
    policy.observe(StepFacts(1.0, 0.5, {"a": 24}, ()))
    policy.rank_waiting([RequestView("b", num_prompt_tokens=8)], view)
    policy.observe(StepFacts(1.2, 0.2, {"a": 1, "b": 8}, ("a",)))
    policy.observe(StepFacts(1.3, 0.1, {"b": 1}, ("b",)))
    assert read_steps(file) == [
        RecordedStep(1.0, 0.5, 24, 1, 40),
        RecordedStep(1.2, 0.2, 8, 2, 49),
        RecordedStep(1.3, 0.1, 0, 1, 9),
    ]
    file.write_text(file.read_text() + "[1.4, 0.1")
    assert len(read_steps(file)) == 3, "a line that is being written is none yet"


def test_a_gap_is_what_passes_between_two_decodes_of_as_many() -> None:
    steps = [
        RecordedStep(1.0, 0.5, 16, 2, 32),
        RecordedStep(2.0, 0.5, 0, 2, 34),
        RecordedStep(3.0, 0.75, 0, 2, 36),
        RecordedStep(4.0, 0.5, 0, 1, 19),
        RecordedStep(4.5, 0.5, 0, 1, 20),
        RecordedStep(5.0, 0.625, 0, 1, 21),
    ]
    assert gaps_between_decodes(steps) == {2: [0.25], 1: [0.0, 0.0]}


def test_a_first_token_is_late_by_what_its_own_steps_do_not_explain() -> None:
    """A prompt in two chunks, one that shares its step, and one that found the engine busy."""
    steps = [
        RecordedStep(10.50, 0.25, 8, 1, 8),
        RecordedStep(10.75, 0.25, 8, 1, 16),
        RecordedStep(10.80, 0.05, 0, 1, 17),
        RecordedStep(12.25, 0.125, 8, 1, 8),
        RecordedStep(13.50, 1.0, 8, 1, 8),
    ]
    outcomes = [
        RequestOutcome(start_seconds=2.0, ttft_seconds=0.375),
        RequestOutcome(start_seconds=0.125, ttft_seconds=0.65),
        RequestOutcome(start_seconds=3.0, ttft_seconds=0.75),
        RequestOutcome(start_seconds=5.0, error="refused"),
    ]
    report = LoadReport(LoadPlan("http://none"), 6.0, outcomes, started_at=10.0)
    assert seconds_until_seen(report, steps) == pytest.approx([0.25, 0.15])


def test_a_recording_takes_the_place_of_a_policy_with_options(tmp_path: Path) -> None:
    policy = "models.0.policies.scheduling"
    given = ["--model", "x", "--set", f"{policy}.use=deficit_prefix"]
    given += ["--set", f"{policy}.options.quantum=500", "--set", "models.0.replicas=2"]
    arguments = with_recording([*given, "--set", "server.port=1"], tmp_path / "a: b={c}")
    assert arguments[:4] == ["--model", "x", "--set", "server.port=1"]
    settings = [word for word in arguments[4:] if word != "--set"]
    model = load_config(
        None, flags=parse_assignments(["models.0.source=x", *settings])
    ).config.models[0]
    assert model.policies.scheduling.use.endswith("recording.py:RecordingFcfs")
    assert model.policies.scheduling.options == {"file": str(tmp_path / "a: b={c}")}
