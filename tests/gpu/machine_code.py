"""Machine code of the kernels whose budgets are judged, made in a process beside the tests that simulate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from gpu.cuda_builds import BUILDS as CUDA_BUILDS
from gpu.numba_builds import BUILDS as NUMBA_BUILDS
from gpu.numba_builds import defines_for

from headrace.testing.cubins import KernelFacts, read_facts

Facts = Mapping[str, KernelFacts]
Wanted = tuple[str, str, str]
"""("cuda" or "numba", name of the build, architecture)."""


def cuda_facts(name: str, architecture: str) -> Facts:
    """Return what NVRTC makes of a build, by kernel."""
    from headrace.backends.cupy_raw.compiling import compile_kernels

    source, defines = CUDA_BUILDS[name]
    return read_facts(compile_kernels(source, defines, architecture).cubin)


def numba_facts(name: str, architecture: str) -> Facts:
    """Return what Numba makes of a build, its kernel first; nothing where it has none for this architecture."""
    from headrace.backends.cuda_numba.compiling import compile_kernel, make_source

    source, kernel, _ = NUMBA_BUILDS[name]
    defines = defines_for(NUMBA_BUILDS[name], architecture)
    if defines is None:
        return {}
    compiled = compile_kernel(make_source(source, kernel, defines), architecture)
    facts = read_facts(compiled.cubin)
    return {compiled.name: facts.pop(compiled.name), **facts}


_MAKE = {"cuda": cuda_facts, "numba": numba_facts}


@dataclass(slots=True)
class Builds:
    """Facts made ahead in another process, or where they are asked for."""

    _pool: ProcessPoolExecutor | None = None
    _made: dict[Wanted, Future[Facts]] = field(default_factory=dict)

    def start(self, wanted: Iterable[Wanted]) -> None:
        """Make these, in this order."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(5,))
        for kind, name, architecture in wanted:
            made = self._pool.submit(_MAKE[kind], name, architecture)
            self._made[kind, name, architecture] = made

    def facts(self, kind: str, name: str, architecture: str) -> Facts:
        """Return a build's facts, by kernel. Raises what making it raised."""
        made = self._made.get((kind, name, architecture))
        return _MAKE[kind](name, architecture) if made is None else made.result()

    def close(self) -> None:
        """End the process; what nobody asked for is not made."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


builds = Builds()
