"""Which instruction set the fast path's kernels are written for: what the CPU reports, or less if told.

A level is chosen once per process, because kernels are compiled for it. `amx` is accepted and computed
as `avx512_vnni`: with activations in int8 per group of 32 the vector dot product needs no tiles.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping

import numba
from llvmlite import binding

from headrace.errors import ConfigError

VARIABLE = "HEADRACE_CPU_CAPABILITY"
AVX512_VNNI = "avx512_vnni"
AVX2 = "avx2"
GENERIC = "generic"
REFERENCE = "reference"
LEVELS = ("amx", AVX512_VNNI, AVX2, GENERIC, REFERENCE)
"""From the most able to the least; the last one is the path without these kernels."""

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
NEEDED_FEATURES: Mapping[str, tuple[str, ...]] = {
    AVX512_VNNI: ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"),
    AVX2: ("avx2", "fma", "f16c"),
    GENERIC: ("f16c",) if IS_X86 else (),
}
"""Without F16C LLVM turns f16 into calls of a library that is not there."""
_LESSER_CPUS: Mapping[str, str] = {AVX2: "haswell", GENERIC: "ivybridge"}
"""What x86 code of a level is compiled for where the CPU could do more, so that it proves what it claims."""


def choose_level(wanted: str, features: Mapping[str, bool]) -> str:
    """Return the best level the features allow, at most `wanted` ("": no wish). ConfigError if unknown."""
    if wanted not in ("", *LEVELS):
        raise ConfigError(f"{VARIABLE} is {wanted!r}; it may be {', '.join(LEVELS)} or unset")
    if wanted == REFERENCE:
        return REFERENCE
    allowed = LEVELS[LEVELS.index(wanted) :] if wanted else LEVELS
    for level in allowed:
        needed = NEEDED_FEATURES.get(level)
        if needed is not None and all(features.get(name, False) for name in needed):
            return level
    return REFERENCE


@functools.cache
def level() -> str:
    """Return this process's level. Where Numba was told another CPU, whose features nobody says: none."""
    wanted = os.environ.get(VARIABLE, "")
    if not wanted and _is_another_told():
        return REFERENCE
    return choose_level(wanted, binding.get_host_cpu_features())


def _is_another_told() -> bool:
    """Whether Numba compiles for a CPU that is not this one, by whoever's wish."""
    return numba.config.CPU_NAME not in (None, binding.get_host_cpu_name())


@functools.cache
def has_two_ports() -> bool:
    """Whether all arithmetic on 512 bits shares two ports: Intel's cores. AMD's, which SSE4a tells, have four.

    Codes are then better unpacked rarely, and bf16 multiplied as f32: a dot product of bf16 takes as long there
    as four fused sums of f32, which do twice its work.
    """
    if level() != AVX512_VNNI:
        return False
    if _is_another_told():
        return not str(numba.config.CPU_NAME).startswith("znver")
    return not binding.get_host_cpu_features().get("sse4a", False)


def has_brain_dot() -> bool:
    """Whether this process has AVX-512's dot products of bf16, and they are fast."""
    return _may_use("avx512bf16") and not has_two_ports()


def has_byte_field() -> bool:
    """Whether this process may multiply 64 bytes at once, as numbers of a field."""
    return _may_use("gfni")


def _may_use(extension: str) -> bool:
    """Whether there is an extension of AVX512_VNNI; not where Numba was told a CPU that may lack it."""
    if level() != AVX512_VNNI or _is_another_told():
        return False
    return bool(binding.get_host_cpu_features().get(extension, False))


def compile_for_level() -> None:
    """Let Numba compile for a CPU of the level that was told, if this one could do more.

    Call before the first kernel is made; what was told to Numba itself stands.
    """
    best = choose_level("", binding.get_host_cpu_features())
    is_less = level() != best and level() in _LESSER_CPUS
    if IS_X86 and is_less and numba.config.CPU_NAME is None:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = _LESSER_CPUS[level()], ""
