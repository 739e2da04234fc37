"""Step times between samples: exact at them, growing with rows, alike one by one and in a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.simulator.measured import MeasuredStepTime
from headrace.step_time import StepTimeFormula

FORMULA = StepTimeFormula(0.01, 1e-3, 2e-3, 1e-6)


def sample(tokens: int, sequences: int, rows: int, seconds: float) -> dict[str, float]:
    return {
        "prefill_tokens": tokens,
        "sequences": sequences,
        "kv_rows": rows,
        "seconds": seconds,
    }


SAMPLES = [
    sample(0, 1, 65, 0.011),
    sample(0, 1, 513, 0.013),
    sample(0, 4, 260, 0.019),
    sample(0, 4, 2052, 0.018),
    sample(0, 16, 1040, 0.050),
    sample(0, 16, 8208, 0.070),
    sample(16, 1, 16, 0.040),
    sample(16, 1, 1040, 0.056),
    sample(256, 1, 256, 0.200),
    sample(256, 1, 1280, 0.440),
]


def test_samples_come_back_as_they_were_measured() -> None:
    step_time = MeasuredStepTime(SAMPLES, FORMULA, StepTimeFormula())
    for given_sample in (*SAMPLES[:3], *SAMPLES[5:]):
        counts = [int(given_sample[n]) for n in ("prefill_tokens", "sequences", "kv_rows")]
        assert step_time.seconds(*counts) == pytest.approx(given_sample["seconds"])
    halfway = step_time.seconds(0, 10, 650)
    assert halfway == pytest.approx((0.019 + 0.050) / 2)


def test_a_chunk_costs_more_the_longer_the_context_before_it() -> None:
    """Attention makes each token of a chunk dearer by the context: no sum of the two says that."""
    step_time = MeasuredStepTime(SAMPLES, FORMULA, StepTimeFormula())
    assert step_time.seconds(16, 1, 16 + 512) == pytest.approx((0.040 + 0.056) / 2)
    assert step_time.seconds(136, 1, 136 + 1024) == pytest.approx((0.056 + 0.440) / 2)
    beyond = 0.440 + 0.240  # twice the context: the same slope goes on
    assert step_time.seconds(256, 1, 256 + 2048) == pytest.approx(beyond)
    assert step_time.seconds(300, 1, 300) == pytest.approx(0.200 + 44 * (0.160 / 240))
    beside = 3 * (2e-3 + 256e-6)  # three decodes beside it, by the formula
    with_decodes = step_time.seconds(256, 4, 256 + 4 * 256)
    assert with_decodes == pytest.approx(0.200 + 0.240 / 4 + beside)


def test_the_engine_s_part_is_added() -> None:
    overhead = StepTimeFormula(base_seconds=0.5, seconds_per_sequence=0.25)
    assert MeasuredStepTime(SAMPLES, FORMULA, overhead).seconds(0, 4, 260) == pytest.approx(1.519)


def test_small_decodes_take_the_shorter_of_two_ways() -> None:
    """Beside the engine's own work a decode is a little longer and has nothing to wait for in between."""
    samples = [dict(each) for each in SAMPLES]
    for each, seconds in zip(samples[:4], (0.012, 0.020, 0.018, 0.030), strict=True):
        each["beside_seconds"] = seconds
    step_time = MeasuredStepTime(samples, FORMULA, StepTimeFormula(base_seconds=0.004))
    assert step_time.seconds(0, 1, 65) == pytest.approx(0.012)
    assert step_time.seconds(0, 1, 513) == pytest.approx(0.013 + 0.004)
    assert step_time.seconds(0, 4, 260) == pytest.approx(0.018)
    assert step_time.seconds(0, 16, 1040) == pytest.approx(0.050 + 0.004)
    assert step_time.runs_beside(1, 65) and not step_time.runs_beside(1, 513)
    assert not step_time.runs_beside(16, 1040), "nobody measured so many beside"


def test_what_passes_between_steps_in_a_server_is_added_beyond_the_overhead() -> None:
    overhead = StepTimeFormula(base_seconds=0.001, seconds_per_sequence=0.001)
    gaps = [(1, 0.0015), (2, 0.004), (3, 1e-5), (4, 0.008)]  # of 3: computed beside
    step_time = MeasuredStepTime(SAMPLES, FORMULA, overhead, gaps)
    assert step_time.seconds(0, 1, 65) == pytest.approx(0.011 + 0.002), "the overhead is more"
    assert step_time.seconds(0, 4, 260) == pytest.approx(0.019 + 0.008)
    between = step_time.seconds(0, 3, 195) - MeasuredStepTime(
        SAMPLES, FORMULA, StepTimeFormula()
    ).seconds(0, 3, 195)
    assert between == pytest.approx(0.006)
    assert step_time.seconds(0, 16, 1040) == pytest.approx(0.050 + 0.017 + 0.003)
    assert step_time.seconds(256, 1, 256) == pytest.approx(0.200 + 0.002)


def test_without_samples_the_formula_says() -> None:
    step_time = MeasuredStepTime([], FORMULA, StepTimeFormula())
    assert step_time.seconds(5, 2, 100) == FORMULA.seconds(5, 2, 100)
    assert step_time.seconds(0, 2, 100) == FORMULA.seconds(0, 2, 100)


@given(
    sequences=st.integers(1, 100),
    first=st.integers(1, 10_000),
    tokens=st.just(0) | st.integers(2, 1000),
)
def test_more_rows_never_take_less_and_a_row_of_steps_is_its_steps(
    sequences: int, first: int, tokens: int
) -> None:
    step_time = MeasuredStepTime(SAMPLES, FORMULA, StepTimeFormula(base_seconds=1e-4))
    rows = first * sequences + sequences * np.arange(50) + tokens
    together = step_time.seconds(tokens, sequences, rows)
    assert together.tolist() == [step_time.seconds(tokens, sequences, int(each)) for each in rows]
    assert (np.diff(together) >= 0).all()
