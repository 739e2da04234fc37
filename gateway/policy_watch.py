"""`serve --watch`: a script that is saved takes its own place while the server runs.

The files are looked at, twice a second: that works on every file system, and a save is swapped in
only once its file has stopped changing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from headrace.errors import RequestError
from headrace.gateway.policy_desk import PolicyDesk
from headrace.types import PolicyChoice

_LOOK_SECONDS = 0.5

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class WatchedScript:
    """A policy that comes from a file: where it is at work, and the file."""

    kind: str
    choice: PolicyChoice
    model: str
    """"": the gateway's own."""
    path: str


async def watch_scripts(desk: PolicyDesk, scripts: Sequence[WatchedScript]) -> None:
    """Swap each script in again after it was saved, for ever. One that is refused changes nothing."""
    log = structlog.get_logger("headrace.gateway")
    seen = {script: _stamp(script.path) for script in scripts}
    moving: dict[WatchedScript, Stamp | None] = {}
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for script in scripts:
            stamp = _stamp(script.path)
            if stamp is None or stamp == seen[script]:
                continue
            if moving.get(script) != stamp:
                moving[script] = stamp
                continue
            seen[script] = stamp
            try:
                await desk.swap(script.kind, script.choice, model=script.model)
            except RequestError as error:
                log.error(
                    "policy_not_reloaded", kind=script.kind, file=script.path, reason=str(error)
                )


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
