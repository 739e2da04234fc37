"""The decorators of this package's kernels: compiled for the chosen level, and cached apart by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.kernel_cache import callback, kernel


def fast_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    return kernel(variant=capability.level())(function)


def inlined_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a large function with one caller: LLVM optimizes it once, not again in every caller of its caller."""
    return kernel(variant=capability.level(), inline="always")(function)


def fast_callback(signature: str) -> Callable[[Callable[..., Any]], Any]:
    return callback(signature, variant=capability.level())
