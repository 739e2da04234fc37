"""The Hadamard transform that keys of 8 bits are kept in: scores stay, loud numbers are spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.kernels_hadamard import hadamard_row, hadamard_rows, hadamard_run
from headrace.backends.cpu.fast.kv_pool import FORMS, FastKVPool
from headrace.types import KVGroupSpec

HEAD_DIMS = {16: 16, 48: 16, 64: 64, 80: 16, 96: 32, 128: 128, 256: 256}
"""Of a head, and how many of its numbers are transformed together."""


def rows_of(heads: int, head_dim: int) -> NDArray[np.float32]:
    return np.random.default_rng(head_dim).standard_normal((heads, head_dim)).astype(np.float32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernel_and_matrix_agree_for_every_head_of_a_row(head_dim: int) -> None:
    assert hadamard_run(head_dim) == HEAD_DIMS[head_dim]
    rows = rows_of(3, head_dim)
    expected = hadamard_rows(rows)
    hadamard_row(address(rows), rows.size, head_dim)
    np.testing.assert_allclose(rows, expected, atol=1e-5 * HEAD_DIMS[head_dim])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_are_those_of_the_rows_themselves_times_a_power_of_two(head_dim: int) -> None:
    rows = rows_of(4, head_dim)
    queries, keys = hadamard_rows(rows[:2]), hadamard_rows(rows[2:])
    expected = (rows[:2].astype(np.float64) @ rows[2:].T) * HEAD_DIMS[head_dim]
    np.testing.assert_allclose(queries @ keys.T, expected, atol=1e-9)


def pool_of(head_dim: int, heads: int = 2) -> FastKVPool:
    group = KVGroupSpec(name="all", layers=(0,), num_kv_heads=heads, head_dim=head_dim)
    return FastKVPool([group], 2, 16, FORMS["int8"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_beside_a_loud_number_the_others_keep_their_digits(head_dim: int) -> None:
    """One scale for a row with one number of 100 would round all others to steps of 0.8."""
    rows = rows_of(2, head_dim)[None]
    rows[..., 5] = 100.0
    pool = pool_of(head_dim)
    pool.write_rows(0, [3], rows, rows)
    keys, values = pool.read_rows(0, [3])
    quiet = np.arange(head_dim) // HEAD_DIMS[head_dim] == 0
    quiet[5] = False
    key_error = np.abs(keys - rows)[..., quiet].mean()
    value_error = np.abs(values - rows)[..., quiet].mean()
    assert key_error < 0.6 * value_error < 0.3


@given(
    arrays.arrays(
        np.float32,
        (1, 1, 64),
        elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
    )
)
def test_rows_read_and_written_again_stay_what_they_are(rows: NDArray[np.float32]) -> None:
    pool = pool_of(64, heads=1)
    pool.write_rows(0, [3], rows, rows)
    first = pool.read_rows(0, [3])
    pool.write_rows(0, [20], *first)
    for before, after in zip(first, pool.read_rows(0, [20]), strict=True):
        np.testing.assert_array_equal(before, after)
