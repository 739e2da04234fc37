"""Paged attention in Numba CUDA on the simulator: every case, three orders of threads, against float64."""

from __future__ import annotations

import pytest
from gpu.cases import (
    ATTENTION_CASES,
    TOLERANCE,
    AttentionCase,
    attention_problem,
    check_nan_stays,
)
from gpu.numba_simulated import needs_numba_cuda, numba_kernels

from headrace.testing.cuda_cpu.launcher import ORDERS

pytestmark = [needs_numba_cuda, pytest.mark.kernels]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention_equals_float64_in_every_order_of_threads(case: AttentionCase) -> None:
    kernels, launcher = numba_kernels()
    problem = attention_problem(case)
    for order in ORDERS:
        launcher.order = order
        assert problem.error(problem.answer(kernels)) < TOLERANCE[case.activation], order


def test_nan_stays_in_its_own_sequence() -> None:
    kernels, launcher = numba_kernels()
    launcher.order = "random"
    check_nan_stays(kernels)
