"""The seam between a GPU backend and its machine: what an emulated device replaces, and nothing more.

A backend compiles and launches through `Launcher`, allocates and waits through `Device`. Grids, shared
memory sizes, planning and argument packing stay on this side of the seam, so that a test runs the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Dimensions = tuple[int, int, int]
MEMORY_SHARE = 0.9
"""Part of the device that is used unless told otherwise: what other servers take, too."""


class Device(Protocol):
    """A device that torch allocates on."""

    torch_device: torch.device
    architecture: str
    """sm_80, sm_90, ...: what kernels are compiled for."""
    num_multiprocessors: int
    can_capture: bool
    """Whether torch.cuda.graph records on it."""

    def total_bytes(self) -> int:
        """Return the whole device's memory, whoever holds it."""
        ...

    def free_bytes(self) -> int:
        """Return what can still be allocated, what torch keeps in reserve included."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Run and wait; return how many bytes more it held at its peak than it still holds afterwards.

        torch.OutOfMemoryError where the device has not as much.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""
        ...


class Kernel(Protocol):
    """A compiled kernel."""

    def __call__(
        self, grid: Dimensions, block: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Launch on torch's current stream, asked for anew each time: under capture it is another one.

        `arguments`: torch tensors (their address is passed), None (a null address), NumPy scalars
        (passed as they are). Shared memory above 48 KiB is asked of the driver here.
        """
        ...


class Launcher(Protocol):
    """Compiles kernels of one backend and keeps them."""

    def kernel(self, source: str, name: str, defines: Mapping[str, int | str]) -> Kernel:
        """Return kernel `name` of the source file `source`, specialised by `defines`; compiled once."""
        ...
