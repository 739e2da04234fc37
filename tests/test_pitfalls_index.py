"""Every fault known from other servers that concerns what is built has a test that names it.

A row is one such fault: S streams, P parameters, T text, G log probabilities, C prefix cache,
K scheduler and memory, Q quantized files and loading, M metrics, O overload and limits, R routing,
U keys of callers, X processes and configuration.
A test covers a row by naming it in its docstring.
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent
ROWS = """
    S01 S03 S04 S06 S07 S08 S09 S11 S12 S13 S15 S17 S18 S19
    P02 P03 P04 P05 P06 P07 P09 P10 P11 P12 P14 P15 P16 P18 P19 P20 P23 P24 P26 P27
    T01 T03 T04 T06 T07 T08 T10 T11
    G02
    C01 C02 C03 C04 C06 C07
    K01 K03 K04 K07 K08 K09 K11
    Q02 Q03 Q04 Q05 Q06 Q08 Q11 Q12 Q13 Q15 Q16
    M03 M05 M06
    O01 O02 O04 O05 O08 O09 O10
    R01 R02 R04 R07 R08
    U03
    X01 X02 X03 X06 X07
""".split()


@pytest.fixture(scope="module")
def named() -> set[str]:
    """The rows that docstrings of tests name."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(re.findall(r"\b[A-Z]\d\d\b", ast.get_docstring(node) or ""))
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_test(row: str, named: set[str]) -> None:
    assert row in named


def test_no_test_names_a_row_that_is_not_listed(named: set[str]) -> None:
    assert named <= set(ROWS)
