"""The first start ever compiles for half a minute: half of that is done by a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import Any

from numba import types

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.kernel_cache import kernel_folder

_ATTENTION, _DRAW = "attend_unit", "draw_share"
_MOST_SECONDS = 300.0
_LOOK_SECONDS = 0.02


class FirstStart:
    """Has what is not in the cache compiled into it: attention, which the step is made of, then the draw.

    Nothing is lost where that fails: who needs the code compiles it then. Without a cache nothing is done.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if kernel_folder(capability.level()) is None or (
            _is_there(_ATTENTION) and _is_there(_DRAW)
        ):
            return
        command = f"from {__name__} import compile_apart; compile_apart()"
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen([sys.executable, "-P", "-c", command])

    def wait_for_attention(self) -> None:
        """Return when attention is in the cache, or will not be."""
        end = time.monotonic() + _MOST_SECONDS
        while self._is_going() and not _is_there(_ATTENTION) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Return when all is in the cache, or will not be. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def give_up(self) -> None:
        """End the process, if it still goes: nobody will need what it compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _is_going(self) -> bool:
        return self._process is not None and self._process.poll() is None


def _is_there(name: str) -> bool:
    """Whether the cache has a kernel: its code is written behind its index."""
    folder = kernel_folder(capability.level())
    return folder is not None and any(folder.rglob(f"*.{name}-*.nbc"))


def attention_types() -> tuple[Any, ...]:
    """What the step's interpreter calls attention with."""
    longs = types.Array(types.int64, 1, "C")
    return (longs, longs, *(types.int64,) * 3, types.UniTuple(types.int64, 3))


def compile_apart() -> None:
    """What the process does."""
    from headrace.backends.cpu.fast.kernels_attend import attend_unit

    attend_unit.compile(attention_types())  # type: ignore[attr-defined]
    import headrace.backends.cpu.fast.kernels_draw  # noqa: F401
