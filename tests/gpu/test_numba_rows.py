"""Row operations, quantized products and the draw in Numba CUDA, simulated in three orders of threads."""

from __future__ import annotations

import pytest
from gpu.numba_simulated import needs_numba_cuda, numba_kernels
from gpu.row_cases import DRAW_CASES, ROW_CASES

from headrace.testing.cuda_cpu.launcher import ORDERS

pytestmark = [needs_numba_cuda, pytest.mark.kernels]


@pytest.mark.parametrize("name", [*ROW_CASES, *DRAW_CASES])
def test_kernels_equal_float64_in_every_order_of_threads(name: str) -> None:
    kernels, launcher = numba_kernels()
    for order in ORDERS:
        launcher.order = order
        ({**ROW_CASES, **DRAW_CASES}[name])(kernels)
