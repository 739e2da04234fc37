"""The step-time model: it learns the formula, survives odd steps, and knows its own error."""

from __future__ import annotations

import math
import random

import pytest

from headrace.step_time import StepTimeFormula, StepTimeModel

TRUE = StepTimeFormula(0.004, 8e-5, 3e-4, 2e-7)


def counts(choice: random.Random) -> tuple[int, int, int]:
    return choice.choice([0, 0, 16, 256, 512]), choice.randrange(1, 33), choice.randrange(20000)


def fitted(
    steps: int, noise: float = 0.0, odd: float = 0.0, truth: StepTimeFormula = TRUE
) -> StepTimeModel:
    choice = random.Random(1)
    model = StepTimeModel()
    for _ in range(steps):
        step = counts(choice)
        seconds = truth.seconds(*step) * (1 + noise * choice.uniform(-1, 1))
        model.observe(*step, seconds * (50 if choice.random() < odd else 1))
    return model


def worst(model: StepTimeModel, truth: StepTimeFormula = TRUE) -> float:
    choice = random.Random(2)
    steps = [counts(choice) for _ in range(200)]
    return max(abs(model.predict(*s) / truth.seconds(*s) - 1) for s in steps)


def test_the_formula_is_found_from_exact_steps() -> None:
    model = fitted(400)
    assert worst(model) < 0.02
    assert model.relative_error < 0.02
    assert model.formula.seconds_per_prefill_token == pytest.approx(8e-5, rel=0.05)


def test_noise_is_averaged_and_reported() -> None:
    model = fitted(2000, noise=0.2)
    assert worst(model) < 0.15
    assert 0.05 < model.relative_error < 0.2


def test_a_few_absurd_steps_do_not_spoil_the_fit() -> None:
    assert worst(fitted(2000, noise=0.05, odd=0.02)) < 0.4


def test_a_machine_that_became_slower_is_learnt() -> None:
    model = fitted(1000)
    slow = StepTimeFormula(0.008, 16e-5, 6e-4, 4e-7)
    choice = random.Random(3)
    for _ in range(3000):
        step = counts(choice)
        model.observe(*step, slow.seconds(*step))
    assert worst(model, slow) < 0.1


def test_predictions_are_never_negative_and_nothing_overflows() -> None:
    model = StepTimeModel()
    for step in range(20000):  # one kind of step only: three of four terms cannot be told apart
        model.observe(0, 1, 100, 0.01 if step % 2 else 0.011)
    assert model.predict(0, 1, 100) == pytest.approx(0.0105, rel=0.1)
    assert all(value >= 0 for value in (model.predict(10**6, 1000, 10**9), model.predict(0, 0, 0)))
    assert math.isfinite(model.predict(10**6, 1000, 10**9))
    model.observe(512, 8, 1000, 0.06)
    assert math.isfinite(model.predict(512, 8, 1000))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_steps_of_no_sensible_length_teach_nothing(seconds: float) -> None:
    model = fitted(20)
    before = model.formula
    model.observe(1, 1, 1, seconds)
    assert model.formula == before


def test_nothing_is_claimed_before_the_first_steps() -> None:
    model = StepTimeModel()
    assert not model.is_fitted
    assert model.relative_error == 1.0
    assert model.predict(512, 32, 10000) == 0.0


@pytest.mark.parametrize(
    ("seconds", "most", "tokens"),
    [(0.014, 512, 100), (0.014, 64, 64), (0.004, 512, 0), (9, 512, 512)],
)
def test_prefill_tokens_within_a_time(seconds: float, most: int, tokens: int) -> None:
    formula = StepTimeFormula(0.004, 1e-4, 0.0, 0.0)
    assert formula.prefill_tokens_within(seconds + 1e-9, 4, 100, most) == tokens


def test_free_prefill_is_bounded_by_what_there_is() -> None:
    assert StepTimeFormula().prefill_tokens_within(0.1, 4, 100, 300) == 300
