"""The tables that kernels' machine code is held against: registers at most, the other columns at least.

`HEADRACE_WRITE_BUDGET=1` writes them anew; the change is then part of a review.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.testing.cubins import KernelFacts


def assert_no_local_memory(facts: KernelFacts, kernel: str) -> None:
    assert facts.stack_bytes == facts.local_bytes == facts.local_accesses == 0, f"{kernel}: {facts}"


def row_of(facts: KernelFacts) -> dict[str, int]:
    """Return a kernel's row of a table."""
    return {
        "registers": facts.registers,
        "wide_loads": facts.wide_loads,
        "loads_in_flight": facts.loads_in_flight,
        "wide_copies": facts.wide_copies,
        "groups_in_flight": facts.groups_in_flight,
        "tensor_products": facts.tensor_products,
    }


def allowed_by(table: Path, name: str, architecture: str, found: Any) -> Any:
    """Return the table's entry for a build; `found` is put there first where tables are written."""
    entries = json.loads(table.read_text()) if table.exists() else {}
    if os.environ.get("HEADRACE_WRITE_BUDGET"):
        entries.setdefault(name, {})[architecture] = found
        table.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return entries[name][architecture]


def assert_within(row: Mapping[str, int], allowed: Mapping[str, int], kernel: str) -> None:
    """Hold a row against the table's. A column that the table lacks is a KeyError."""
    assert row["registers"] <= allowed["registers"], f"{kernel}: {row}, the table: {allowed}"
    for column in row.keys() - {"registers"}:
        assert row[column] >= allowed[column], f"{kernel}, {column}: {row}, the table: {allowed}"
