"""`serve --watch`: a script that is saved takes its own place while the server runs.

Scripts in force are watched, however they came there, and those that another policy has replaced are
not. The files are looked at, twice a second: that works on every file system, and a save is swapped in
only once its file has stopped changing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import structlog

from headrace.errors import RequestError
from headrace.gateway.policy_desk import InForce, PolicyDesk
from headrace.types import PolicyChoice

_LOOK_SECONDS = 0.5

Stamp = tuple[int, int]
Place = tuple[str, str, str]
"""Model ("": the gateway's own), kind and file."""


async def watch_scripts(desk: PolicyDesk, path_of: Callable[[str], str | None]) -> None:
    """Swap each script in again after it was saved, for ever. One that is refused changes nothing.

    `path_of(use)` says which file a policy is from; None: from none.
    """
    log = structlog.get_logger("headrace.gateway")
    seen: dict[Place, Stamp | None] = {}
    moving: dict[Place, Stamp] = {}
    looked_at = time.time_ns()
    while True:
        scripts = _scripts(desk, path_of)
        seen = {
            place: seen[place] if place in seen else _stamp_before(place[2], looked_at)
            for place in scripts
        }
        looked_at = time.time_ns()
        await asyncio.sleep(_LOOK_SECONDS)
        for (model, kind, path), choice in scripts.items():
            place, stamp = (model, kind, path), _stamp(path)
            if stamp is None or stamp == seen[place]:
                continue
            if moving.get(place) != stamp:
                moving[place] = stamp
                continue
            seen[place] = stamp
            try:
                await desk.swap(kind, choice, model=model)
            except RequestError as error:
                log.error("policy_not_reloaded", kind=kind, file=path, reason=str(error))


def _scripts(desk: PolicyDesk, path_of: Callable[[str], str | None]) -> dict[Place, PolicyChoice]:
    """Return the scripts in force that can be swapped: of several admission policies, none."""
    in_force: list[InForce] = desk.in_force()
    num_admission = sum(each.state.kind == "admission" for each in in_force)
    found: dict[Place, PolicyChoice] = {}
    for each in in_force:
        state, path = each.state, path_of(each.state.use)
        if path is not None and (state.kind != "admission" or num_admission == 1):
            place = (each.model, state.kind, path)
            found[place] = PolicyChoice(state.use, state.options)
    return found


def _stamp_before(path: str, nanoseconds: int) -> Stamp | None:
    """Return the stamp of a file that is met first; None where it was saved since the last look, for
    what was loaded may be older."""
    stamp = _stamp(path)
    return stamp if stamp is not None and stamp[0] < nanoseconds else None


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
