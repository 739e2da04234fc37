"""Row operations, quantized products and the draw in CUDA C++, run on the CPU in three orders of threads."""

from __future__ import annotations

import pytest
from gpu.cuda_cpp import cuda_kernels, needs_cuda_cpp
from gpu.row_cases import DRAW_CASES, ROW_CASES

from headrace.testing.cuda_cpu.launcher import ORDERS

pytestmark = [needs_cuda_cpp, pytest.mark.kernels]


@pytest.mark.parametrize("name", [*ROW_CASES, *DRAW_CASES])
def test_kernels_equal_float64_in_every_order_of_threads(name: str) -> None:
    kernels, launcher = cuda_kernels()
    for order in ORDERS:
        launcher.configure(order)
        ({**ROW_CASES, **DRAW_CASES}[name])(kernels)
