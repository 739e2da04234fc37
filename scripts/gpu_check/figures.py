"""What is measured, what it should be, and the table and JSON that say what it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WRONG, SKIPPED, FAILED = "ok", "WRONG", "skipped", "failed"
"""FAILED: a section ended before it could judge; its reason says how."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held against; `aim` is the better one of the two."""

    bound: float
    aim: float | None = None
    is_upper: bool = True
    """Whether smaller is better."""

    def verdict(self, value: float) -> str:
        """Return "aim met", "met" or "missed"; "met" is all there is without an aim."""
        if self.aim is not None and self._holds(value, self.aim):
            return "aim met"
        return "met" if self._holds(value, self.bound) else "missed"

    def __str__(self) -> str:
        sign = "<=" if self.is_upper else ">="
        aim = "" if self.aim is None else f", aim {self.aim:g}"
        return f"{sign} {self.bound:g}{aim}"

    def _holds(self, value: float, bound: float) -> bool:
        return value <= bound if self.is_upper else value >= bound


def at_least(bound: float, aim: float | None = None) -> Goal:
    return Goal(bound, aim, False)


BANDWIDTH: Mapping[str, Goal | None] = {
    "copy ceiling, TB/s": None,
    "decode even bf16, us": None,
    "decode even bf16, TB/s": None,
    "decode even bf16, % of copy": at_least(75, 90),
    "decode even bf16, x torch": None,
    "decode even fp8, us": None,
    "decode even fp8, TB/s": None,
    "decode even fp8, % of copy": None,
    "decode even fp8, x bf16": at_least(1.3, 1.6),
    "decode skewed bf16, us": None,
    "decode skewed bf16, TB/s": None,
    "decode skewed bf16, % of copy": None,
    "decode skewed bf16, % of even": at_least(90),
    "decode skewed bf16, x torch": None,
    "decode skewed fp8, us": None,
    "decode skewed fp8, TB/s": None,
    "decode skewed fp8, % of copy": None,
    "decode skewed fp8, % of even": at_least(90),
    "decode skewed fp8, x bf16": None,
    "decode single bf16, us": None,
    "decode single bf16, TB/s": None,
    "decode single bf16, % of copy": None,
    "decode single bf16, x torch": None,
    "decode single fp8, us": None,
    "decode single fp8, TB/s": None,
    "decode single fp8, % of copy": None,
    "decode single fp8, x bf16": None,
}
SAMPLING: Mapping[str, Goal | None] = {
    "sample 64 x 128k greedy, us": Goal(30),
    "sample 64 x 128k greedy, x torch": None,
    "sample 64 x 128k top-k + top-p, us": Goal(120, 60),
    "sample 64 x 128k top-k + top-p, x torch": None,
}
LAUNCHES: Mapping[str, Goal | None] = {
    "host time of a prepared launch, us": Goal(5),
    "host time of an operation, us": None,
}
STEPS: Mapping[str, Goal | None] = {
    "decode step, 1 sequence, graph, ms": None,
    "decode step, 1 sequence, eager, ms": None,
    "decode step, 32 sequences, graph, ms": None,
    "decode step, 32 sequences, eager, ms": None,
}
MEASURED: Mapping[str, Mapping[str, Goal | None]] = {
    "bandwidth": BANDWIDTH,
    "sampling": SAMPLING,
    "launches": LAUNCHES,
    "steps": STEPS,
}
"""Section -> every figure that a backend is measured by, in the order of the table.

even: 32 sequences of 4,096 rows of keys; skewed: 4 of 16,384, 28 of 2,048, 1 of 8,192; single: 1 of 16,384.
8 KV heads of 128, 4 query heads each. "x torch", "x bf16": how many times as fast.
"""
GOALS = {name: goal for goals in MEASURED.values() for name, goal in goals.items()}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: a check with a verdict, or a measurement with a value."""

    backend: str
    section: str
    name: str
    value: float | None = None
    verdict: str = ""
    """OK, WRONG, SKIPPED or FAILED; of a value with a goal: met, aim met, missed."""
    note: str = ""

    def line(self) -> str:
        """Return it as a line of JSON: how a section hands it to the process that started it."""
        return json.dumps(asdict(self))

    def cell(self) -> str:
        value = "" if self.value is None else f"{self.value:.4g}"
        parts = [value, self.verdict, f"({self.note})" if self.note else ""]
        return " ".join(part for part in parts if part)


def measured(backend: str, section: str, name: str, value: float) -> Figure:
    """Return the figure of a measurement with its verdict. KeyError where `name` is not in GOALS."""
    goal = GOALS[name]
    return Figure(backend, section, name, value, "" if goal is None else goal.verdict(value))


def read_figures(text: str) -> list[Figure]:
    """Read lines of JSON; a last line that was cut off is left out."""
    lines = text.splitlines(keepends=True)
    return [Figure(**json.loads(line)) for line in lines if line.endswith("\n")]


def table(figures: Iterable[Figure], backends: Sequence[str]) -> str:
    """Return a Markdown table: a row per figure, its goal, and a column per backend."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures:
        cells = rows.setdefault((figure.section, figure.name), {})
        before = cells.get(figure.backend)
        cells[figure.backend] = figure.cell() if before is None else f"{before}; {figure.cell()}"
    lines = [["section", "figure", "goal", *backends], ["---"] * (3 + len(backends))]
    for (section, name), cells in rows.items():
        goal = GOALS.get(name)
        told = "" if goal is None else str(goal)
        lines.append([section, name, told, *(cells.get(backend, "") for backend in backends)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(_row(line, widths) for line in lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(min(width, 44)) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def as_json(figures: Iterable[Figure], facts: Mapping[str, Any]) -> str:
    """Return the whole result: `facts` of the run beside its figures with their goals."""
    listed = [
        asdict(figure) | {"goal": str(GOALS[figure.name]) if GOALS.get(figure.name) else ""}
        for figure in figures
    ]
    return json.dumps({**facts, "figures": listed}, indent=1) + "\n"
