"""Numba source to PTX to cubin: needs no driver, so that a machine without a GPU can judge the code.

PTX comes from Numba (NVVM), the cubin from nvJitLink through cuda.core, as at run time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from headrace.backends.cuda_numba.kernels.source import KernelSource
from headrace.backends.gpu.kernel_cache import entry_name, kept_code
from headrace.cache import cache_folder

HERE = Path(__file__).parent
_ENTRY = re.compile(r"\.visible \.entry\s+(\w+)")
_lock = threading.Lock()
TOOLKIT = ("numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one kernel."""

    name: str
    cubin: bytes
    log: str
    """What ptxas said: registers, spills, shared memory."""
    num_threads: int


def make_source(source: str, name: str, defines: Mapping[str, int | str]) -> KernelSource:
    """Return kernel `name` of kernels/<source>.py, specialised."""
    module = importlib.import_module(f"headrace.backends.cuda_numba.kernels.{source}")
    made: KernelSource = getattr(module, name)(**defines)
    return made


def compile_ptx(made: KernelSource, architecture: str) -> tuple[str, str]:
    """Return the PTX and the name of its entry. `architecture` is sm_80, sm_90, ..."""
    from numba import cuda

    number = int(architecture.removeprefix("sm_"))
    capability = number // 10, number % 10
    with _lock, _compiling_for(capability):
        ptx, _ = cuda.compile_ptx(
            made.function, made.signature, cc=capability, launch_bounds=made.num_threads
        )
    found = _ENTRY.search(ptx)
    assert found is not None, "Numba writes one entry per kernel"
    return ptx, found[1]


def compile_kernel(made: KernelSource, architecture: str) -> Compiled:
    """Return the kernel's machine code for an architecture."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx, name = compile_ptx(made, architecture)
    options = LinkerOptions(arch=architecture, ptxas_options="-v")
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    cubin = linker.link("cubin")
    log = "\n".join((linker.get_info_log(), linker.get_error_log()))
    return Compiled(name, bytes(cubin.code), log, made.num_threads)


def cached_kernel(
    source: str, name: str, defines: Mapping[str, int | str], architecture: str
) -> tuple[str, bytes]:
    """Return the entry's name and the cubin from the cache folder, compiled and put there if absent.

    The key is everything the code depends on: sources, what it is specialised for, architecture, toolkit.
    """
    toolkit = [importlib.metadata.version(package) for package in TOOLKIT]
    facts = source, name, sorted(defines.items()), architecture, toolkit

    def build() -> bytes:
        made = compile_kernel(make_source(source, name, defines), architecture)
        return made.name.encode() + b"\0" + made.cubin

    files = (*sorted(HERE.glob("kernels/*.py")), HERE / "primitives.py", Path(__file__))
    kept = kept_code(_folder, entry_name(f"{name}-{architecture}", facts, files), build)
    entry, cubin = kept.split(b"\0", 1)
    return entry.decode(), cubin


def _folder() -> Path:
    return cache_folder() / "kernels" / "cuda_numba"


@contextmanager
def _compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Let device functions compile without a device: Numba asks the current one for its capability."""
    import numba.cuda.compiler
    import numba.cuda.dispatcher

    modules = numba.cuda.compiler, numba.cuda.dispatcher
    before = [module.get_current_device for module in modules]
    device = SimpleNamespace(compute_capability=capability, id=0)
    for module in modules:
        module.get_current_device = lambda: device
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.get_current_device = function
