"""The first start ever compiles for 40 to 60 seconds of core time: half of that in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS
from headrace.backends.cpu.kernel_cache import kernel_folder

_ATTENTION = {PAIRS: "attend_pairs_at", CODES: "attend_codes_at"}
_MOST_SECONDS = 300.0


class FirstStart:
    """Has what is not in the cache compiled into it: attention and the draw; the caller compiles the rest.

    Nothing is lost where that fails: who needs the code compiles it then. Without a cache nothing is done. The
    process ends with this object at the latest.
    """

    def __init__(self, form: int) -> None:
        """`form` of keys and values, PAIRS or CODES."""
        self._process: subprocess.Popen[bytes] | None = None
        if kernel_folder(capability.level()) is None or all(map(_is_there, names(form))):
            return
        command = (
            f"import gc; gc.disable(); from {__name__} import compile_apart; compile_apart({form})"
        )
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


def names(form: int) -> tuple[str, ...]:
    """Return what is compiled apart, by the names that the cache has it under."""
    return _ATTENTION[form], "draw_share"


def compile_apart(form: int) -> None:
    """What the process does."""
    from headrace.backends.cpu.fast.kernels_attend_unit import attention_at

    attention_at(form)
    import headrace.backends.cpu.fast.kernels_draw  # noqa: F401


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While much is compiled: collecting garbage takes a tenth of that, and saves 200 MB."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
