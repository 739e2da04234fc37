"""Runs Numba CUDA kernels' Python source on the CPU, one greenlet per CUDA thread, and looks for faults.

`rebound` copies a kernel function with numba.cuda and the device primitives exchanged for their plain
meaning, so the very source that is compiled for a device is what runs. Barriers and warp collectives are the
only places where threads change. Reported as `SimulatorError`:

- a barrier or collective that some thread never reaches, with the lines where each waits;
- two threads touching an element of shared memory, one of them writing, with no barrier between; global
  memory that one thread wrote and another touches in the same launch without one;
- an index outside an array, negative ones included; misaligned 16-byte accesses.

Shared and local arrays start as NaN (0x5A bytes for integers). Asynchronous copies land only when waited for.
Why not numba-cuda's own simulator: it has no warp intrinsics, runs threads as OS threads, and its
successor dropped it.
"""

from __future__ import annotations

import gc
import random
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from greenlet import getcurrent, greenlet

FULL_MASK = 0xFFFFFFFF
Access = tuple[int, int, int, int, bool]  # thread, warp, block barriers, warp barriers, atomic


class SimulatorError(AssertionError):
    """A kernel did what a device does not allow or does not promise."""


@dataclass(frozen=True, slots=True)
class Point:
    """Coordinates as CUDA names them."""

    x: int
    y: int = 0
    z: int = 0


class Thread(greenlet):  # type: ignore[misc]
    """One CUDA thread."""

    index: int
    point: Point
    block: Block
    waits: tuple[str, int] | None = None
    value: Any = None
    answers: Any = None

    def setup(self, index: int, block: Block) -> None:
        self.index, self.block = index, block
        self.point = Point(index)
        self.copies: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []


@dataclass(slots=True)
class Launch:
    """What all blocks of one launch share."""

    grid: Point
    num_threads: int
    order: str
    seed: int
    shared_bytes: int


class Block:
    """Runs the threads of one block, changing between them at barriers only."""

    def __init__(self, launch: Launch, number: int, point: Point) -> None:
        self.launch, self.number, self.point = launch, number, point
        self.barriers = 0
        self.warp_barriers = [0] * (-(-launch.num_threads // 32))
        self.shared: dict[Any, SharedArray] = {}
        self.threads: list[Thread] = []

    def run(self, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        rng = random.Random(self.launch.seed * 1_000_003 + self.number)
        for index in range(self.launch.num_threads):
            thread = Thread(lambda: function(*arguments))
            thread.gr_context = copy_context()  # NumPy's error handling lives in it
            thread.setup(index, self)
            self.threads.append(thread)
        alive = list(self.threads)
        try:
            while alive:
                ready = [thread for thread in alive if thread.waits is None]
                if not ready:
                    self._stuck(alive)
                if self.launch.order == "reverse":
                    ready.reverse()
                elif self.launch.order == "random":
                    rng.shuffle(ready)
                self._step(ready)
                alive = [thread for thread in alive if not thread.dead]
                for warp in range(len(self.warp_barriers)):
                    self._meet_warp(warp)
                self._meet_block(alive)
        finally:
            for thread in self.threads:
                if not thread.dead and thread:
                    thread.throw()
            self.threads.clear()  # no cycles are left for the garbage collector

    def _step(self, ready: list[Thread]) -> None:
        """Give each its turn. A thread's parent is the greenlet that made it, which runs this."""
        thread = ready[0]
        try:
            for thread in ready:
                thread.switch()
        except (SimulatorError, IndexError) as error:
            raise SimulatorError(
                f"thread {thread.index} of block {self.point.x},{self.point.y}: {error}"
            ) from error

    def _stuck(self, alive: list[Thread]) -> NoReturn:
        places: dict[str, list[int]] = {}
        for thread in alive:
            assert thread.waits is not None
            places.setdefault(f"{thread.waits[0]} at {_line_of(thread)}", []).append(thread.index)
        told = "; ".join(
            f"{place}: {len(found)} threads, {found[:4]}..." for place, found in places.items()
        )
        raise SimulatorError(f"not all threads reach the same barrier: {told}")

    def _meet_block(self, alive: list[Thread]) -> None:
        if alive and all(thread.waits == ("syncthreads", 0) for thread in alive):
            values = [thread.value for thread in alive]
            for thread in alive:
                thread.answers, thread.waits = values, None
            self.barriers += 1

    def _meet_warp(self, warp: int) -> None:
        lanes = self.threads[warp * 32 : warp * 32 + 32]
        waits = lanes[0].waits
        if waits is not None and waits[1] == FULL_MASK and len(lanes) == 32:
            if not any(lane.waits != waits or lane.dead for lane in lanes):  # nearly always so
                self._answer(warp, lanes)
                return
        for first in lanes:
            if first.dead or first.waits is None or first.waits[0] == "syncthreads":
                continue
            operation, mask = first.waits
            if not mask >> (first.index % 32) & 1:
                raise SimulatorError(f"{operation}: a lane is not in its own mask {mask:#x}")
            named = [thread for thread in lanes if mask >> (thread.index % 32) & 1]
            if any(thread.dead for thread in named):
                raise SimulatorError(f"{operation}: mask {mask:#x} names lanes that have exited")
            if any(thread.waits is None or thread.waits[0] == "syncthreads" for thread in named):
                continue
            if any(thread.waits != first.waits for thread in named):
                found = sorted({str(thread.waits) for thread in named})
                raise SimulatorError(f"lanes of a warp meet in different collectives: {found}")
            self._answer(warp, named)

    def _answer(self, warp: int, named: list[Thread]) -> None:
        values = {thread.index % 32: thread.value for thread in named}
        for thread in named:
            thread.answers, thread.waits = values, None
        if len(named) == len(self.threads[warp * 32 : warp * 32 + 32]):
            self.warp_barriers[warp] += 1


def _line_of(thread: Thread) -> str:
    frame = thread.gr_frame
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def meet(operation: str, mask: int, value: Any) -> Any:
    """Wait for the other threads; return their values: by lane, or a list at a block's barrier."""
    thread = getcurrent()
    thread.value, thread.waits = value, (operation, int(mask) & FULL_MASK)
    thread.parent.switch()
    return thread.answers


def _now(thread: Thread, is_atomic: bool) -> Access:
    block, warp = thread.block, thread.index // 32
    return thread.index, warp, block.barriers, block.warp_barriers[warp], is_atomic


def _ordered(earlier: Access, now: Access) -> bool:
    if earlier[0] == now[0] or earlier[2] < now[2] or (earlier[4] and now[4]):
        return True
    return earlier[1] == now[1] and earlier[3] < now[3]


class DeviceArray:
    """A flat array that checks every access. Elements are NumPy scalars."""

    def __init__(self, values: np.ndarray[Any, Any], name: str) -> None:
        self.values, self.name = values, name
        self._written: dict[int, tuple[int, Access]] = {}
        """Element -> block and access of the last write. An array lives for one launch."""

    def note(self, index: int, write: bool, is_atomic: bool) -> None:
        """Global memory: what another thread wrote in this launch needs a barrier in between."""
        if not write and not self._written:
            return
        thread = getcurrent()
        now, number = _now(thread, is_atomic), thread.block.number
        written, key = self._written, index
        if key in written:
            block, earlier = written[key]
            both_atomic = earlier[4] and is_atomic
            if not both_atomic and (block != number or not _ordered(earlier, now)):
                does = "writes" if write else "reads"
                raise SimulatorError(
                    f"race on {self.name}[{index}]: thread {earlier[0]} of block {block} wrote, thread "
                    f"{now[0]} of block {number} {does} in the same launch"
                )
        if write:
            written[key] = number, now

    def touch(self, index: Any, count: int = 1, *, write: bool, is_atomic: bool = False) -> int:
        """Check an access to `count` elements from `index` on and return the index as an int."""
        first = int(index)
        if first < 0 or first + count > len(self.values):
            raise SimulatorError(f"{self.name}[{first}:{first + count}] of {len(self.values)}")
        if count > 1 and first % count:
            raise SimulatorError(f"{self.name}[{first}]: misaligned access to {count} elements")
        for each in range(first, first + count):
            self.note(each, write, is_atomic)
        return first

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.touch(index, write=False)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self.touch(index, write=True)] = value


class SharedArray(DeviceArray):
    """Shared memory: every pair of accesses is checked, reads before writes too."""

    def __init__(self, values: np.ndarray[Any, Any], name: str) -> None:
        super().__init__(values, name)
        self._writer: dict[int, Access] = {}
        self._readers: dict[int, dict[int, Access]] = {}

    def note(self, index: int, write: bool, is_atomic: bool) -> None:
        now = _now(getcurrent(), is_atomic)
        writer = self._writer.get(index)
        if writer is not None and writer[0] != now[0] and not _ordered(writer, now):
            self._race(index, writer, "wrote", now, write)
        readers = self._readers.get(index)
        if not write:
            if readers is None:
                self._readers[index] = {now[0]: now}
            else:
                readers[now[0]] = now
            return
        if readers:
            for reader in readers.values():
                if reader[0] != now[0] and not _ordered(reader, now):
                    self._race(index, reader, "read", now, write)
            readers.clear()
        self._writer[index] = now

    def _race(self, index: int, earlier: Access, did: str, now: Access, write: bool) -> NoReturn:
        does = "writes" if write else "reads"
        raise SimulatorError(
            f"race on {self.name}[{index}]: thread {earlier[0]} {did}, thread {now[0]} {does}, "
            "no barrier between"
        )


def _poisoned(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    values = np.empty(size, dtype)
    if dtype.kind == "f":
        values.fill(np.nan)
    else:
        values.view(np.uint8).fill(0x5A)
    return values


class _Shared:
    def array(self, size: int, dtype: Any) -> SharedArray:
        frame, block = sys._getframe(1), getcurrent().block
        key = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        if size == 0:
            size = block.launch.shared_bytes // np.dtype(dtype).itemsize
        if key not in block.shared:
            name = f"shared at {Path(key[0]).name}:{key[1]}"
            block.shared[key] = SharedArray(_poisoned(size, np.dtype(dtype)), name)
        found: SharedArray = block.shared[key]
        return found


class _Local:
    def array(self, size: int, dtype: Any) -> np.ndarray[Any, Any]:
        return _poisoned(size, np.dtype(dtype))


class SimulatedCuda:
    """What kernels use of numba.cuda."""

    shared, local = _Shared(), _Local()

    @property
    def threadIdx(self) -> Point:
        point: Point = getcurrent().point
        return point

    @property
    def blockIdx(self) -> Point:
        point: Point = getcurrent().block.point
        return point

    @property
    def gridDim(self) -> Point:
        grid: Point = getcurrent().block.launch.grid
        return grid

    def syncthreads(self) -> None:
        meet("syncthreads", 0, None)

    def syncwarp(self) -> None:
        meet("syncwarp", FULL_MASK, None)

    def shfl_xor_sync(self, mask: int, value: Any, distance: int) -> Any:
        return meet("shfl_xor", mask, value)[getcurrent().index % 32 ^ int(distance)]

    def shfl_up_sync(self, mask: int, value: Any, distance: int) -> Any:
        lane = getcurrent().index % 32
        return meet("shfl_up", mask, value)[lane - int(distance) if lane >= distance else lane]


def rebound(function: Callable[..., Any], table: Mapping[int, Any]) -> Callable[..., Any]:
    """Return the function with every global and free variable in `table` (by id) exchanged.

    Device functions (they have a `py_func`) that it uses are rebound as well.
    """

    def exchange(value: Any) -> Any:
        if id(value) in table:
            return table[id(value)]
        inner = getattr(value, "py_func", None)
        return value if inner is None else rebound(inner, table)

    def cell(old: types.CellType) -> types.CellType:
        return types.CellType(exchange(old.cell_contents))

    assert isinstance(function, types.FunctionType)
    used = set(function.__code__.co_names)
    scope = {
        name: exchange(value) if name in used else value
        for name, value in function.__globals__.items()
    }
    cells = tuple(cell(old) for old in function.__closure__ or ())
    return types.FunctionType(function.__code__, scope, function.__name__, None, cells)


def run_grid(
    function: Callable[..., Any],
    grid: tuple[int, int, int],
    num_threads: int,
    arguments: Sequence[Any],
    *,
    shared_bytes: int = 0,
    order: str = "forward",
    seed: int = 0,
) -> None:
    """Run a rebound kernel for every block of the grid, blocks in the same order as threads."""
    launch = Launch(Point(*grid), num_threads, order, seed, shared_bytes)
    points = [
        Point(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])
    ]
    numbered = list(enumerate(points))
    if order == "reverse":
        numbered.reverse()
    elif order == "random":
        random.Random(seed).shuffle(numbered)
    collects = gc.isenabled()
    gc.disable()  # every thread is an object with a stack: looking through them took most of the time
    try:
        with np.errstate(all="ignore"):
            for number, point in numbered:
                Block(launch, number, point).run(function, arguments)
    finally:
        if collects:
            gc.enable()
