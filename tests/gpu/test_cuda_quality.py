"""What NVRTC makes of the CUDA C++ kernels, without a GPU: registers and instructions against the budget table.

`HEADRACE_WRITE_BUDGET=1` writes the table anew; the change is then part of a review.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu.budget import allowed_by, assert_no_local_memory, assert_within, row_of
from gpu.cuda_builds import ARCHITECTURES, BUILDS
from gpu.machine_code import builds

from headrace.backends.cupy_raw.compiling import FOLDER
from headrace.testing.cubins import missing_disassembler

TABLE = Path(__file__).parent / "budget_cuda.json"
_reason = missing_disassembler() or ("" if find_spec("cupy") else "no cupy: install 'kernels'")
pytestmark = [pytest.mark.skipif(bool(_reason), reason=_reason), pytest.mark.kernels]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_machine_code_is_within_the_budget(name: str, architecture: str) -> None:
    """Registers at most, wide loads and those in flight at least as in the table; nothing in local memory."""
    rows = {}
    for kernel, facts in builds.facts("cuda", name, architecture).items():
        assert_no_local_memory(facts, kernel)
        rows[kernel] = row_of(facts)
    allowed = allowed_by(TABLE, name, architecture, rows)
    assert set(rows) == set(allowed)
    for kernel, row in rows.items():
        assert_within(row, allowed[kernel], kernel)


@pytest.mark.parametrize("name", ["attention d128 g4 bf16", "sampling"])
def test_nvcc_compiles_without_spills_too(name: str, tmp_path: Path) -> None:
    """What the one compiler takes the other may refuse."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source, defines = BUILDS[name]
    options = [f"-D{key}={value}" for key, value in defines.items()]
    done = subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-Xptxas", "-v", *options,
         str(FOLDER / source), "-o", str(tmp_path / "out.cubin")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    spills = [line for line in done.stderr.splitlines() if "spill" in line]
    assert spills and all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
