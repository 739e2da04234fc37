"""CUDA C++ kernels under sanitizers, and with planted faults that some check must notice."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu.cuda_builds import MUTANTS, SANITIZED
from gpu.cuda_cpp import needs_cuda_cpp
from gpu.sanitized import NOTICED, run_apart

pytestmark = [needs_cuda_cpp, pytest.mark.kernels]


@pytest.mark.parametrize("mode", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(mode: str) -> None:
    halves = SANITIZED[::2], SANITIZED[1::2]
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda checks: run_apart(mode, "-", checks), halves):
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["none", "address,undefined", "thread"])
def test_every_planted_fault_is_noticed(mode: str) -> None:
    """A barrier, a wait, a bound or a reduction less: each makes its check fail."""
    planted = [(define, check) for (define, check), how in MUTANTS.items() if how == mode]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda pair: run_apart(mode, pair[0], (pair[1],)), planted))
    survived = [
        (pair, done.stderr[-500:])
        for pair, done in zip(planted, ended, strict=True)
        if "g++ refuses" in done.stderr or not re.search(NOTICED[mode], done.stderr)
    ]
    assert not survived
