"""Progress of a download that another program or library writes, by the size of what has arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below `folder`; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except OSError:
            continue
    return total


@contextmanager
def watch_folder(
    folder: Path, expected_bytes: int, report: Callable[[float], None]
) -> Iterator[None]:
    """Report how much of `expected_bytes` has been added to `folder` while the block runs."""
    if expected_bytes <= 0:
        yield
        return
    done = threading.Event()
    before = folder_bytes(folder) if folder.exists() else 0

    def poll() -> None:
        while not done.wait(_POLL_SECONDS):
            arrived = folder_bytes(folder) - before
            report(min(1.0, max(0.0, arrived / expected_bytes)))

    thread = threading.Thread(target=poll, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
