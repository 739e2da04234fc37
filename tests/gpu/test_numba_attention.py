"""Paged attention in Numba CUDA on the simulator: every case, three orders of threads, against float64."""

from __future__ import annotations

import pytest
from gpu.cases import ATTENTION_CASES, TOLERANCE, AttentionCase, attention_problem
from gpu.numba_simulated import needs_numba_cuda, numba_kernels

pytestmark = [needs_numba_cuda, pytest.mark.kernels]
ORDERS = ("forward", "reverse", "random")


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention_equals_float64_in_every_order_of_threads(case: AttentionCase) -> None:
    kernels, launcher = numba_kernels()
    problem = attention_problem(case)
    tile_tokens = kernels.tile_tokens(case.spec, problem.kv, case.activation)
    for order in ORDERS:
        launcher.order = order
        out = problem.empty_output()
        kernels.paged_attention(problem.q, problem.kv, case.spec, problem.work(tile_tokens), out)
        assert problem.error(out) < TOLERANCE[case.activation], order


def test_nan_stays_in_its_own_sequence() -> None:
    case = AttentionCase("neighbours", ((1, 60), (1, 60), (2, 20)), group=2)
    kernels, launcher = numba_kernels()
    problem = attention_problem(case)
    problem.kv.values[problem.block_tables[1, 1], 3] = float("nan")
    launcher.order = "random"
    out = problem.empty_output()
    kernels.paged_attention(problem.q, problem.kv, case.spec, problem.work(1), out)
    assert out[1].isnan().all()
    out[1] = 0
    problem.expected[1] = 0
    assert problem.error(out) < TOLERANCE[case.activation]
