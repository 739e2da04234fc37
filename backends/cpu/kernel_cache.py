"""Compiles kernels and keeps the machine code in the user's cache folder, so that later starts only load it.

Numba's own key is one file's time and size, which misses an edited helper in another file: the folder
is named after a digest of every source here and the compiler's version. Numba adds the CPU's features.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numba

from headrace.backends.cpu.fast.capability import compile_for_level
from headrace.cache import cache_folder
from headrace.errors import ConfigError

compile_for_level()


@functools.cache
def kernel_folder(variant: str = "") -> Path | None:
    """Return the folder of these kernels, made if absent; None where it cannot be written to.

    A variant's folder bears its name, and its digest covers the sources of the fast path too.
    """
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {metadata.version(package)}\n".encode())
    sources = Path(__file__).parent.glob("kernel*.py")
    fast = Path(__file__).parent.glob("fast/[ckil]*.py") if variant else ()  # and their makers
    for source in sorted((*sources, *fast)):
        digest.update(source.name.encode() + source.read_bytes())
    name = f"{digest.hexdigest()[:16]}{'-' if variant else ''}{variant}"
    try:
        folder = cache_folder() / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def kernel(variant: str = "", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: numba.njit without the GIL, with NumPy's division rule, cached on disk.

    `variant` names what the code depends on beside its source: an instruction set.
    """

    def compiler(is_cached: bool) -> Any:
        return numba.njit(nogil=True, error_model="numpy", cache=is_cached, **options)

    return _caching(variant, compiler)


def callback(signature: str, variant: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: numba.cfunc, whose `address` other kernels can call, cached likewise."""

    def compiler(is_cached: bool) -> Any:
        return numba.cfunc(signature, error_model="numpy", cache=is_cached)

    return _caching(variant, compiler)


def _caching(variant: str, compiler: Callable[[bool], Any]) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        folder = kernel_folder(variant)
        previous = numba.config.CACHE_DIR
        if folder is not None:
            numba.config.CACHE_DIR = str(folder)
        try:
            return compiler(folder is not None)(function)
        finally:
            numba.config.CACHE_DIR = previous

    return decorate
