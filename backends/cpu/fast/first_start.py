"""The first start ever compiles for half a minute: what can be compiled apart is, by a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.kernel_cache import kernel_folder

_MODULE = "headrace.backends.cpu.fast.kernels_draw"
_MOST_SECONDS = 300.0


@contextlib.contextmanager
def compiling_draw() -> Iterator[None]:
    """Have the draw compiled into the cache while the block runs, where it is not there yet; wait for it.

    Nothing is lost where that fails: whoever imports the module then compiles it.
    """
    folder = kernel_folder(capability.level())
    if folder is None or any(folder.rglob("*draw_share*.nbi")):
        yield
        return
    process = None
    with contextlib.suppress(OSError):
        process = subprocess.Popen([sys.executable, "-P", "-c", f"import {_MODULE}"])
    try:
        yield
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MOST_SECONDS)
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
