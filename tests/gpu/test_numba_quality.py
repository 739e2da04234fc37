"""What NVVM and nvJitLink make of the Numba kernels, without a GPU, against the budget table.

`HEADRACE_WRITE_BUDGET=1` writes the table anew; the change is then part of a review.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.budget import allowed_by, assert_no_local_memory, assert_within, row_of
from gpu.machine_code import builds
from gpu.numba_builds import ARCHITECTURES, BUILDS
from gpu.numba_simulated import needs_numba_cuda

from headrace.testing.cubins import missing_disassembler

TABLE = Path(__file__).parent / "budget_numba.json"
_reason = missing_disassembler()
pytestmark = [
    needs_numba_cuda,
    pytest.mark.skipif(bool(_reason), reason=_reason),
    pytest.mark.kernels,
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_machine_code_is_within_the_budget(name: str, architecture: str) -> None:
    """Registers at most, wide loads and copies at least as in the table; nothing in local memory."""
    found = builds.facts("numba", name, architecture)
    if not found:
        pytest.skip(f"{architecture} computes this with another kernel")
    for each, facts in found.items():  # divisions and, on sm_80, shuffles bring functions along
        assert_no_local_memory(facts, each)
    kernel = next(iter(found))
    row = row_of(found[kernel])
    del row["loads_in_flight"]  # no column of this table
    assert_within(row, allowed_by(TABLE, name, architecture, row), kernel)
