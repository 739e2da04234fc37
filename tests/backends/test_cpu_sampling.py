"""The CPU's draw against the sampling rule, token for token, and against the distribution it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.batches import sampling_batch
from headrace.backends.cpu import kernels_sampling
from headrace.backends.cpu.sampling import Sampler
from headrace.backends.cpu.team import Team
from headrace.testing import numpy_sampling
from headrace.types import SamplingBatch, StepResult, TokenMasks

Array = np.ndarray[Any, np.dtype[Any]]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Array:
    values = np.random.default_rng(seed).standard_normal((rows, vocab)) * spread
    return np.asarray(values.astype(np.float32))


def draw(
    logits: Array, sampling: SamplingBatch, masks: TokenMasks | None = None, threads: int = 2
) -> StepResult:
    return Sampler(Team(threads)).sample(torch.tensor(logits), sampling, masks)


def check(logits: Array, sampling: SamplingBatch, masks: TokenMasks | None = None) -> StepResult:
    given, exact = draw(logits, sampling, masks), numpy_sampling.sample(logits, sampling, masks)
    assert given.failed.tolist() == exact.failed.tolist()
    assert given.token_ids.tolist() == exact.token_ids.tolist()
    if exact.logprobs is None:
        assert given.logprobs is None
        return given
    for name, bound in (("logprobs", 2e-5), ("top_token_ids", 0), ("top_logprobs", 2e-5)):
        np.testing.assert_allclose(
            getattr(given, name), getattr(exact, name), atol=bound, rtol=1e-6
        )
    return given


def same(count: int, columns: Mapping[str, float]) -> dict[str, Sequence[float]]:
    """Columns with one value for all rows, and a position of its own for each."""
    filled: dict[str, Sequence[float]] = {name: [value] * count for name, value in columns.items()}
    return filled | {"seeds": [0xDEADBEEF12345678] * count, "positions": range(count)}


FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 1.0, 50.0, 1e6])
@pytest.mark.parametrize("vocab", [1, 3, 65, 1000])
def test_every_filter_draws_what_the_rule_draws(
    filters: dict[str, float], temperature: float, vocab: int
) -> None:
    rows = 12
    logits = random_logits(rows, vocab, seed=vocab)
    check(logits, sampling_batch(rows, same(rows, {"temperature": temperature, **filters})))


@pytest.mark.parametrize("filters", FILTERS)
def test_ties_go_to_the_lower_id(filters: dict[str, float]) -> None:
    """Whole numbers in few sizes: the boundary of every filter falls among equal logits."""
    rows, vocab = 16, 300
    logits = np.round(random_logits(rows, vocab, seed=5, spread=1.0))
    for temperature in (0.0, 1.0):
        columns = same(rows, {"temperature": temperature, "num_logprobs": 7, **filters})
        check(logits, sampling_batch(rows, columns))


@pytest.mark.parametrize("filters", FILTERS)
def test_all_logits_equal(filters: dict[str, float]) -> None:
    logits = np.full((6, 130), -4.5, np.float32)
    check(logits, sampling_batch(6, same(6, {"temperature": 1.0, **filters})))


def test_a_large_vocabulary() -> None:
    logits = random_logits(4, 262_145, seed=8)
    columns = same(4, {"temperature": 1.0, "num_logprobs": 20})
    check(logits, sampling_batch(4, columns | {"top_k": [0, 50, 0, 1], "top_p": [1, 1, 0.95, 1]}))


@given(
    st.integers(2, 200),
    st.integers(0, 2**32),
    st.integers(0, 250),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
    st.floats(0.125, 8, width=32),
)
def test_any_combination_of_filters(
    vocab: int, seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(3, vocab, seed=seed)
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    check(logits, sampling_batch(3, same(3, columns)))


def test_bias_penalties_and_masks_in_the_rules_order() -> None:
    rows, vocab = 8, 100
    logits = random_logits(rows, vocab)
    rng = np.random.default_rng(2)
    histories = [
        {int(t): int(c) for t, c in zip(rng.choice(vocab, 20, False), rng.integers(0, 4, 20), strict=True)}
        for _ in range(rows)
    ]  # fmt: skip
    biases: list[dict[int, float]] = [{} for _ in range(rows)]
    biases[1] = {99: 100.0, 0: -100.0}
    biases[2] = {int(t): -np.inf for t in np.argsort(-logits[2])[:30]}
    allowed = np.full((2, 4), 0, np.uint32)
    allowed[0, 1], allowed[1, 3] = 0x80000001, 0b1110
    masks = TokenMasks(np.array([4, 6], np.int32), allowed.view(np.int32))
    for temperature in (0.0, 0.9):
        columns = same(
            rows,
            {
                "temperature": temperature,
                "presence_penalty": 0.6,
                "frequency_penalty": -0.4,
                "repetition_penalty": 1.3,
                "num_logprobs": 3,
            },
        )
        sampling = sampling_batch(rows, columns, histories=histories, biases=biases)
        tokens = check(logits, sampling, masks).token_ids
        assert tokens[4] in (32, 63)
        assert tokens[6] in (97, 98, 99)


# --- rows that fail, rows that only score -------------------------------------------


def test_a_failed_row_leaves_its_neighbours_alone() -> None:
    logits = random_logits(6, 90)
    sampling = sampling_batch(6, same(6, {"temperature": 1.0, "num_logprobs": 2}))
    alone = check(logits, sampling)
    broken = logits.copy()
    broken[1, 40] = np.nan
    broken[3] = -np.inf
    broken[4, 7] = np.inf
    result = check(broken, sampling)
    assert result.failed.tolist() == [False, True, False, True, True, False]
    for row in (0, 2, 5):
        assert result.token_ids[row] == alone.token_ids[row]


def test_a_row_whose_every_token_is_forbidden_fails() -> None:
    sampling = sampling_batch(
        2, same(2, {"temperature": 1.0}), biases=[{t: -np.inf for t in range(40)}, {}]
    )
    assert check(random_logits(2, 40), sampling).failed.tolist() == [True, False]


def test_scores_are_of_the_untouched_distribution() -> None:
    logits = random_logits(3, 60)
    columns = same(3, {"temperature": 2.0, "top_k": 1, "top_p": 0.1, "num_logprobs": 5})
    columns |= {"score_token_ids": [17, -1, 59]}
    result = check(logits, sampling_batch(3, columns, biases=[{17: 9.0}, {}, {}]))
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert np.isfinite(result.logprobs).all()
    assert np.isfinite(result.top_logprobs).all()
    assert result.token_ids[0] == 17


def test_rows_without_log_probabilities_among_rows_with_them() -> None:
    columns = same(4, {"temperature": 0.0}) | {"num_logprobs": [-1, 0, 3, 1]}
    result = check(random_logits(4, 20), sampling_batch(4, columns))
    assert result.top_token_ids is not None
    assert (result.top_token_ids[2] >= 0).all()
    assert result.top_token_ids[3, 1:].tolist() == [-1, -1]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.tensor(random_logits(2, 50))
    before = logits.clone()
    sampling = sampling_batch(2, same(2, {"temperature": 1.0}), biases=[{1: 5.0}, {2: 5.0}])
    Sampler(Team(1)).sample(logits, sampling, None)
    assert torch.equal(logits, before)


# --- seeds and distributions --------------------------------------------------------


def test_a_rows_draw_depends_on_its_own_seed_and_position_alone() -> None:
    logits = random_logits(5, 2000, spread=1.0)
    columns = same(5, {"temperature": 1.0, "top_p": 0.95})
    columns["seeds"] = [1, 2**63 + 5, 1, 7, 2**64 - 1]
    together = draw(logits, sampling_batch(5, columns)).token_ids
    for threads in (1, 2):
        for row in range(5):
            own = {name: values[row : row + 1] for name, values in columns.items()}
            alone = draw(logits[row : row + 1], sampling_batch(1, own), threads=threads)
            assert alone.token_ids[0] == together[row]


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_draws_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    """Chi-square over 20,000 draws; the draws are fixed, so this cannot fail by chance later."""
    count, vocab = 20_000, 12
    row = np.linspace(2, -2, vocab).astype(np.float32)[np.random.default_rng(1).permutation(vocab)]
    sampling = sampling_batch(count, same(count, {"temperature": 0.8, **filters}))
    tokens = draw(np.tile(row, (count, 1)), sampling).token_ids
    s = (row.astype(np.float64) - row.max()) / np.float32(0.8)
    kept = numpy_sampling.kept_tokens(s, sampling, 0)
    expected = np.exp(s[kept]) / np.exp(s[kept]).sum() * count
    seen = np.bincount(tokens, minlength=vocab)
    assert seen.sum() == seen[kept].sum()
    statistic = ((seen[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_an_absurd_temperature_is_close_to_uniform_and_top_k_one_is_greedy() -> None:
    count, vocab = 4000, 8
    logits = np.tile(random_logits(1, vocab), (count, 1))
    flat = draw(logits, sampling_batch(count, same(count, {"temperature": 1e6}))).token_ids
    assert np.abs(np.bincount(flat, minlength=vocab) / count - 1 / vocab).max() < 0.03
    one = draw(logits, sampling_batch(count, same(count, {"temperature": 2.0, "top_k": 1})))
    assert (one.token_ids == logits[0].argmax()).all()


def test_read_only_arrays_are_taken_as_they_are() -> None:
    sampling = sampling_batch(2, same(2, {"temperature": 1.0}), biases=[{1: 5.0}, {}])
    for name in ("bias_ids", "bias_values", "seeds", "temperature"):
        getattr(sampling, name).flags.writeable = False
    check(random_logits(2, 30), sampling)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 65, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize(
    "kind", ["drawn", "equal", "lowest", "infinite", "nan", "nan before infinity"]
)
def test_the_largest_logit_is_found_wherever_it_is(size: int, kind: str) -> None:
    random = np.random.default_rng(size)
    row = random.standard_normal(size).astype(np.float32)
    if kind in ("equal", "lowest"):
        row[:] = 1.5 if kind == "equal" else -np.inf
    elif kind == "nan before infinity":
        row[-1], row[0] = np.inf, np.nan
    elif kind != "drawn":
        row[random.integers(size)] = np.inf if kind == "infinite" else np.nan
    best, index = kernels_sampling._best_of(row)
    if kind.startswith("nan"):
        assert np.isnan(best)
    else:
        assert (best, index) == (row.max(), row.argmax())
