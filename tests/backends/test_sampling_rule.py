"""The sampling rule itself: what every backend's draw is compared with must be right first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.batches import sampling_batch
from headrace.testing.numpy_sampling import gumbel_noise, log_softmax, philox4x32, sample
from headrace.types import TokenMasks

VOCAB = 50


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, vocab)) * 2


def draws(row: Sequence[float], count: int, columns: Mapping[str, float]) -> list[int]:
    """Draw `count` times from the same row, at positions 0 .. count - 1."""
    filled: dict[str, Sequence[float]] = {n: [value] * count for n, value in columns.items()}
    filled |= {"seeds": [7] * count, "positions": range(count)}
    sampling = sampling_batch(count, filled)
    return [int(t) for t in sample(np.tile(row, (count, 1)), sampling, None).token_ids]


# --- the noise ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_equals_the_published_vectors(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    assert philox4x32(np.array([counter], np.uint32), key)[0].tolist() == expected


def test_noise_of_a_token_is_lane_of_a_counter() -> None:
    seed, position = 0x0123456789ABCDEF, 3_000_000_000
    words = philox4x32(np.array([[2, position, 0, 0]], np.uint32), (0x89ABCDEF, 0x01234567))[0]
    u = ((int(words[1]) >> 9) + 0.5) * 2**-23
    assert gumbel_noise(seed, position, 11)[9] == -np.log(-np.log(u))


def test_noise_is_finite_at_both_ends_of_the_unit_interval() -> None:
    ends = np.array([0.5, 2**23 - 0.5]) * 2**-23
    assert np.float32(ends[0]) > 0 and np.float32(ends[1]) < 1
    low, high = -np.log(-np.log(ends))
    assert -2.9 < low and high < 16.7


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = np.concatenate([gumbel_noise(5, position, 1000) for position in range(40)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.03)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.06)


# --- filters --------------------------------------------------------------------


def test_greedy_takes_the_lower_id_of_a_tie_whatever_the_filters() -> None:
    row = np.array([[0.0, 3.0, 1.0, 3.0]])
    columns = {"temperature": [0.0], "top_k": [1.0], "top_p": [0.1], "min_p": [0.9]}
    assert sample(row, sampling_batch(1, columns), None).token_ids.tolist() == [1]


def test_temperature_one_draws_the_softmax_itself() -> None:
    row = np.log([0.5, 0.25, 0.15, 0.1])
    counts = np.bincount(draws(row.tolist(), 20_000, {"temperature": 1}), minlength=4)
    expected = 20_000 * np.array([0.5, 0.25, 0.15, 0.1])
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


def test_an_absurd_temperature_is_close_to_uniform() -> None:
    counts = np.bincount(draws([9.0, 3.0, 1.0, 0.0], 8_000, {"temperature": 1e6}), minlength=4)
    assert counts.min() > 1_800


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert set(draws([1.0, 1.001, 0.0], 50, {"temperature": 1e-30})) == {1}


def test_top_k_keeps_exactly_k_with_ties_to_the_lower_id() -> None:
    row = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert set(draws(row, 200, {"temperature": 100, "top_k": 2})) == {1, 2}


def test_top_k_off_differs_from_greedy_and_one_equals_it() -> None:
    row = random_logits(1)[0].tolist()
    assert len(set(draws(row, 100, {"temperature": 2, "top_k": 0}))) > 5
    assert set(draws(row, 100, {"temperature": 2, "top_k": 1})) == {int(np.argmax(row))}
    assert draws(row, 100, {"temperature": 2, "top_k": 10_000}) == draws(
        row, 100, {"temperature": 2}
    )


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = np.log([0.5, 0.25, 0.15, 0.1]).tolist()
    assert set(draws(row, 300, {"temperature": 1, "top_p": 0.74})) == {0, 1}
    assert set(draws(row, 300, {"temperature": 1, "top_p": 0.76})) == {0, 1, 2}
    assert set(draws(row, 300, {"temperature": 1, "top_p": 0})) == {0}


def test_top_p_is_computed_after_temperature_and_after_top_k() -> None:
    row = np.log([0.5, 0.25, 0.15, 0.1]).tolist()
    assert set(draws(row, 300, {"temperature": 1, "top_p": 0.8})) == {0, 1, 2}
    assert set(draws(row, 300, {"temperature": 10, "top_p": 0.8})) == {0, 1, 2, 3}
    # Of the two that top_k leaves the first has 2/3: 0.6 keeps it alone, 0.7 both.
    assert set(draws(row, 300, {"temperature": 1, "top_k": 2, "top_p": 0.6})) == {0}
    assert set(draws(row, 300, {"temperature": 1, "top_k": 2, "top_p": 0.7})) == {0, 1}


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    row = np.log([0.5, 0.26, 0.14, 0.1]).tolist()
    assert set(draws(row, 300, {"temperature": 1, "min_p": 0.5})) == {0, 1}
    assert set(draws(row, 300, {"temperature": 1, "min_p": 1})) == {0}


def test_penalties_follow_their_definitions() -> None:
    row = np.array([[2.0, -2.0, 1.0, 1.0, 0.5]])
    sampling = sampling_batch(
        1,
        {
            "repetition_penalty": [2.0],
            "presence_penalty": [0.3],
            "frequency_penalty": [0.1],
            "temperature": [0.0],
        },
        histories=[{0: 0, 1: 0, 2: 3}],
    )
    # 0: 2 / 2 = 1 (in the prompt only); 2: 1 / 2 - 3 * 0.1 - 0.3 = -0.1; 3 stays 1 and loses the tie.
    assert sample(row, sampling, None).token_ids.tolist() == [0]
    lower = sampling_batch(
        1, {"repetition_penalty": [2.1], "temperature": [0.0]}, histories=[{0: 0, 1: 0, 2: 3}]
    )
    assert sample(row, lower, None).token_ids.tolist() == [3]
    negative = np.array([[-1.0, -1.5]])
    once = sampling_batch(1, {"repetition_penalty": [2.0]}, histories=[{0: 0}])
    assert sample(negative, once, None).token_ids.tolist() == [1]


def test_bias_may_force_or_forbid_and_adds_up() -> None:
    row = np.array([[5.0, 1.0, 0.0]] * 3)
    sampling = sampling_batch(3, biases=[{}, {0: -np.inf}, {2: 100.0}])
    assert sample(row, sampling, None).token_ids.tolist() == [0, 1, 2]


def test_a_mask_leaves_the_other_rows_alone() -> None:
    logits = random_logits(3, vocab=70)
    bits = np.zeros((1, 3), np.int32)
    bits[0, 2] = 1 << 5  # token 69
    bits[0, 0] = np.uint32(1 << 31).view(np.int32)  # token 31, the sign bit
    masks = TokenMasks(rows=np.array([1], np.int32), bits=bits)
    drawn = sample(logits, sampling_batch(3), masks).token_ids.tolist()
    best = logits.argmax(axis=1).tolist()
    assert drawn == [best[0], 31 if logits[1, 31] >= logits[1, 69] else 69, best[2]]


# --- reproducibility ------------------------------------------------------------


@given(st.permutations(range(6)))
def test_a_draw_depends_on_seed_and_position_and_on_no_other_row(order: list[int]) -> None:
    logits, columns = random_logits(6), {"temperature": np.ones(6), "seeds": np.arange(6) + 2**40}
    columns["positions"] = np.arange(6) * 11
    alone = sample(logits, sampling_batch(6, columns), None).token_ids
    moved = {name: np.asarray(values)[order] for name, values in columns.items()}
    assert sample(logits[order], sampling_batch(6, moved), None).token_ids.tolist() == [
        int(alone[index]) for index in order
    ]


def test_seeds_and_positions_both_change_the_draw() -> None:
    row = np.zeros((1, VOCAB))
    tokens = {
        int(
            sample(
                row,
                sampling_batch(1, {"temperature": [1], "seeds": [seed], "positions": [position]}),
                None,
            ).token_ids[0]
        )
        for seed, position in [(1, 0), (2, 0), (1 << 32, 0), (1, 1), (1, 2)]
    }
    assert len(tokens) >= 4


# --- log probabilities and failures ----------------------------------------------


def test_log_probabilities_are_of_the_untouched_row() -> None:
    logits = random_logits(3)
    sampling = sampling_batch(
        3,
        {"temperature": [0.5] * 3, "top_k": [1] * 3, "num_logprobs": [3, 0, -1]},
        biases=[{4: -np.inf}] * 3,
    )
    result = sample(logits, sampling, None)
    assert result.logprobs is not None and result.top_logprobs is not None
    assert result.top_token_ids is not None
    expected = log_softmax(logits[0])
    order = np.argsort(-logits[0])[:3]
    assert result.top_token_ids.tolist() == [order.tolist(), [-1] * 3, [-1] * 3]
    np.testing.assert_allclose(result.top_logprobs[0], expected[order], rtol=1e-6)
    np.testing.assert_allclose(result.logprobs[0], expected[result.token_ids[0]], rtol=1e-6)
    assert result.logprobs[1] < 0 and result.logprobs[2] == 0


def test_nobody_asking_gives_no_arrays_and_zero_alternatives_give_empty_ones() -> None:
    logits = random_logits(2)
    off = sample(logits, sampling_batch(2), None)
    assert off.logprobs is None and off.top_token_ids is None and off.top_logprobs is None
    none_listed = sample(logits, sampling_batch(2, {"num_logprobs": [0, 0]}), None)
    assert none_listed.top_token_ids is not None and none_listed.top_token_ids.shape == (2, 0)


def test_more_log_probabilities_than_tokens_are_cut() -> None:
    result = sample(np.array([[0.0, 1.0]]), sampling_batch(1, {"num_logprobs": [4]}), None)
    assert result.top_token_ids is not None
    assert result.top_token_ids.tolist() == [[1, 0, -1, -1]]


def test_a_scoring_row_reports_the_token_it_was_given() -> None:
    logits = random_logits(1)
    columns: dict[str, Sequence[float]] = {"score_token_ids": [9], "num_logprobs": [1]}
    columns |= {"temperature": [1.0], "top_k": [1]}
    result = sample(logits, sampling_batch(1, columns, biases=[{9: -np.inf}]), None)
    assert result.token_ids.tolist() == [9] and result.logprobs is not None
    assert result.logprobs[0] == pytest.approx(log_softmax(logits[0])[9], rel=1e-6)


def test_a_row_with_nan_fails_alone() -> None:
    logits = random_logits(3)
    expected = sample(logits, sampling_batch(3), None).token_ids.tolist()
    logits[1, 5] = np.nan
    result = sample(logits, sampling_batch(3, {"num_logprobs": [2, 2, 2]}), None)
    assert result.failed.tolist() == [False, True, False]
    assert result.token_ids.tolist() == [expected[0], 0, expected[2]]
    assert result.logprobs is not None and np.isfinite(result.logprobs).all()


def test_a_row_without_a_possible_token_fails() -> None:
    nothing = [dict.fromkeys(range(VOCAB), -np.inf)]
    assert sample(random_logits(1), sampling_batch(1, biases=nothing), None).failed.tolist() == [
        True
    ]
    infinite = np.array([[1.0, np.inf]])
    assert sample(infinite, sampling_batch(1), None).failed.tolist() == [True]


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.copy()
    sample(logits, sampling_batch(2, biases=[{0: 5.0}, {}], histories=[{1: 2}, {}]), None)
    np.testing.assert_array_equal(logits, before)


def test_no_rows_give_an_empty_result() -> None:
    result = sample(np.zeros((0, VOCAB)), sampling_batch(0), None)
    assert result.token_ids.shape == (0,) and result.failed.shape == (0,)
