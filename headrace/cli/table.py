"""Rows of text as a table with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length, each column as wide as its longest cell; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[-1]]).rstrip())
