"""CUDA C++ kernels under sanitizers, and with planted faults that some check must notice."""

from __future__ import annotations

import re

import pytest
from gpu.cuda_cpp import needs_cuda_cpp
from gpu.sanitized import MODES, NOTICED, UNPLANTED, endings, jobs_of

pytestmark = [needs_cuda_cpp, pytest.mark.kernels]


@pytest.mark.parametrize("mode", MODES[1:])
def test_sanitizers_find_nothing(mode: str) -> None:
    for done in endings(mode)[: len(UNPLANTED)]:
        assert done.status == 0, done.errors[-3000:]


@pytest.mark.parametrize("mode", MODES)
def test_every_planted_fault_is_noticed(mode: str) -> None:
    """A barrier, a wait, a bound or a reduction less: each makes its check fail."""
    ended = endings(mode)
    survived = [
        (define, checks, done.errors[-500:])
        for (define, checks), done in zip(jobs_of(mode), ended, strict=True)
        if define != "-"
        and ("g++ refuses" in done.errors or not re.search(NOTICED[mode], done.errors))
    ]
    assert not survived
