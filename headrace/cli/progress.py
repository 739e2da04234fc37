"""A progress bar for the stages of a start: fetch, load, compile, warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stage_progress(*, enabled: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Yield report(stage, fraction); draws on standard error, and only where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

    if not enabled:
        yield lambda stage, fraction: None
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=fraction)

        yield report
