"""What NVVM and nvJitLink make of the Numba kernels, without a GPU, against the budget table.

`HEADRACE_WRITE_BUDGET=1` writes the table anew; the change is then part of a review.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gpu.numba_builds import ARCHITECTURES, BUILDS, defines_for
from gpu.numba_simulated import needs_numba_cuda

from headrace.testing.cubins import KernelFacts, missing_disassembler, read_facts

TABLE = Path(__file__).parent / "budget_numba.json"
_reason = missing_disassembler()
pytestmark = [
    needs_numba_cuda,
    pytest.mark.skipif(bool(_reason), reason=_reason),
    pytest.mark.kernels,
]


def budget() -> dict[str, dict[str, dict[str, int]]]:
    table: dict[str, dict[str, dict[str, int]]] = {}
    if TABLE.exists():
        table = json.loads(TABLE.read_text())
    return table


def row_of(facts: KernelFacts) -> dict[str, int]:
    return {
        "registers": facts.registers,
        "wide_loads": facts.wide_loads,
        "wide_copies": facts.wide_copies,
        "groups_in_flight": facts.groups_in_flight,
        "tensor_products": facts.tensor_products,
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_machine_code_is_within_the_budget(name: str, architecture: str) -> None:
    """Registers at most, wide loads and copies at least as in the table; nothing in local memory."""
    from headrace.backends.cuda_numba.compiling import compile_kernel, make_source

    source, kernel, _ = BUILDS[name]
    defines = defines_for(BUILDS[name], architecture)
    if defines is None:
        pytest.skip(f"{architecture} computes this with another kernel")
    made = make_source(source, kernel, defines)
    compiled = compile_kernel(made, architecture)
    found = read_facts(compiled.cubin)  # divisions and, on sm_80, shuffles bring functions along
    for each in found.values():
        assert each.stack_bytes == each.local_bytes == each.local_accesses == 0
    row = row_of(found[compiled.name])
    if os.environ.get("HEADRACE_WRITE_BUDGET"):
        table = budget()
        table.setdefault(name, {})[architecture] = row
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    allowed = budget()[name][architecture]
    assert row["registers"] <= allowed["registers"]
    for column in row.keys() - {"registers"}:
        assert row[column] >= allowed[column], column
