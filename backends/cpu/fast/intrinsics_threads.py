"""What threads need of each other and of the system, as routines: atomic words, spins, sleep, clocks."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import I32, I64, VOID, routine

_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_HAS_FUTEX = platform.system() == "Linux" and (capability.IS_X86 or _IS_ARM)
_FUTEX = 202 if capability.IS_X86 else 98
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE, _EVERYONE = 128, 129, 1 << 20
_NAP_MICROSECONDS = 200
_CLOCK_MONOTONIC = 6 if platform.system() == "Darwin" else 1
_CLOCK_THREAD = 16 if platform.system() == "Darwin" else 3


@routine("int")
def atomic_add(e: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in memory and return what it was."""
    return e.builder.atomic_rmw("add", e.pointer(address, I64), value, "seq_cst")


@routine("int")
def atomic_load(e: Any, address: Any) -> Any:
    return e.builder.load_atomic(e.pointer(address, I64), "seq_cst", 8)


@routine()
def pause(e: Any) -> None:
    """Tell the core that this is a spin."""
    if capability.IS_X86:
        e.call("llvm.x86.sse2.pause", VOID)
    elif _IS_ARM:
        e.call("llvm.aarch64.hint", VOID, ir.Constant(I32, 1))


@routine()
def yield_core(e: Any) -> None:
    """Let another thread run here, if one is waiting."""
    e.call("sched_yield", I32)


@routine("int")
def core_number(e: Any) -> Any:
    """The core this thread runs on; -1 where that is not known."""
    if platform.system() != "Linux":
        return e.integer(-1)
    return e.builder.sext(e.call("sched_getcpu", I32), I64)


@routine()
def park(e: Any, address: Any, seen: Any) -> None:
    """Sleep while the low half of the int64 at `address` is that of `seen`; may wake early."""
    if _HAS_FUTEX:
        zero = e.integer(0)
        wait = e.integer(_FUTEX_WAIT_PRIVATE)
        e.call("syscall", I64, e.integer(_FUTEX), address, wait, seen, zero, zero, zero)
    else:
        e.call("usleep", I32, ir.Constant(I32, _NAP_MICROSECONDS))


@routine()
def wake_all(e: Any, address: Any) -> None:
    """Wake whoever parked on `address`."""
    if _HAS_FUTEX:
        zero = e.integer(0)
        wake, everyone = e.integer(_FUTEX_WAKE_PRIVATE), e.integer(_EVERYONE)
        e.call("syscall", I64, e.integer(_FUTEX), address, wake, everyone, zero, zero, zero)


@routine()
def call_at(e: Any, function: Any, first: Any, second: Any, third: Any) -> None:
    """Call the C function at an address: void (int64, int64, int64)."""
    kind = ir.FunctionType(VOID, [I64] * 3).as_pointer()
    e.builder.call(e.builder.inttoptr(function, kind), [first, second, third])


def _read_clock(e: Any, clock: int) -> Any:
    slot = cgutils.alloca_once(e.builder, ir.LiteralStructType([I64, I64]))
    e.call("clock_gettime", I32, ir.Constant(I32, clock), slot)
    value = e.builder.load(slot)
    seconds, rest = e.builder.extract_value(value, 0), e.builder.extract_value(value, 1)
    return e.builder.add(e.times(seconds, 1_000_000_000), rest)


@routine("int")
def now_nanoseconds(e: Any) -> Any:
    """The monotonic clock."""
    return _read_clock(e, _CLOCK_MONOTONIC)


@routine("int")
def own_nanoseconds(e: Any) -> Any:
    """How long this thread has had a core: what other processes take is left out."""
    return _read_clock(e, _CLOCK_THREAD)
