"""The first start ever compiles for 40 to 60 seconds of core time: half of that in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.kernel_cache import kernel_folder

_NAMES = ("attend_unit_at", "draw_share", "run_unit_at")
_MOST_SECONDS = 300.0


class FirstStart:
    """Has what is not in the cache compiled into it: all but the interpreter, which the caller compiles.

    Nothing is lost where that fails: who needs the code compiles it then. Without a cache nothing is done. The
    process ends with this object at the latest.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if kernel_folder(capability.level()) is None or all(map(_is_there, _NAMES)):
            return
        command = f"import gc; gc.disable(); from {__name__} import compile_apart; compile_apart()"
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen([sys.executable, "-P", "-c", command])
            weakref.finalize(self, _end, self._process)

    def close(self) -> None:
        """Return when all is in the cache, or will not be. A second call does nothing."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MOST_SECONDS)
        self.give_up()

    def give_up(self) -> None:
        """End the process, if it still goes: nobody will need what it compiles."""
        if self._process is not None:
            _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _is_there(name: str) -> bool:
    """Whether the cache has a kernel: its code is written behind its index."""
    folder = kernel_folder(capability.level())
    return folder is not None and any(folder.rglob(f"*.{name}-*.nbc"))


def compile_apart() -> None:
    """What the process does."""
    import headrace.backends.cpu.fast.kernels_attend_unit
    import headrace.backends.cpu.fast.kernels_draw
    import headrace.backends.cpu.fast.kernels_unit  # noqa: F401


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While the interpreter is compiled: collecting garbage takes a tenth of that, and saves 200 MB."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
