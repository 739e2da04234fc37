"""CUDA C++ kernels under sanitizers, and with planted faults that some check must notice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu.cuda_builds import MUTANTS, SANITIZED
from gpu.cuda_cpp import needs_cuda_cpp
from gpu.sanitized import run_apart

pytestmark = [needs_cuda_cpp, pytest.mark.kernels]


@pytest.mark.parametrize("mode", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(mode: str) -> None:
    done = run_apart(mode, "-", SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["none", "address,undefined", "thread"])
def test_every_planted_fault_is_noticed(mode: str) -> None:
    """A barrier, a wait, a bound or a reduction less: each makes its check fail."""
    planted = [(define, check) for (define, check), how in MUTANTS.items() if how == mode]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda pair: run_apart(mode, pair[0], (pair[1],)), planted))
    survived = [pair for pair, done in zip(planted, ended, strict=True) if done.returncode == 0]
    broken = [done.stderr[-500:] for done in ended if "g++ refuses" in done.stderr]
    assert not survived and not broken
