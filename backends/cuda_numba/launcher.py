"""Loads cubins and launches them through cuda.core with prepared arguments on torch's current stream.

Implements headrace.backends.gpu.device.Launcher. Numba's own dispatcher would look at every argument at every
launch, for some 80 microseconds; here addresses and scalars go straight to the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.cuda_numba.compiling import cached_kernel

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Dimensions

DEFAULT_SHARED_BYTES = 48 << 10
"""Static and dynamic together, unless the driver is asked for more."""
SCALARS = {
    np.dtype(np.int32): ctypes.c_int32,
    np.dtype(np.int64): ctypes.c_int64,
    np.dtype(np.float32): ctypes.c_float,
}


def argument(value: Any) -> Any:
    """Return a kernel argument as cuda.core takes it: an address as an int, a scalar as its C type."""
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.generic) and value.dtype in SCALARS:
        return SCALARS[value.dtype](value.item())
    raise TypeError(
        f"a kernel's argument is a tensor, None or a NumPy int32, int64 or float32, not {value!r}"
    )


class NumbaKernel:
    """One loaded kernel. Mutable: the grids it was launched with are kept prepared."""

    def __init__(self, launcher: NumbaLauncher, kernel: Any) -> None:
        self._launcher = launcher
        self._kernel = kernel
        self._configurations: dict[tuple[Dimensions, int, int], Any] = {}

    def __call__(
        self, grid: Dimensions, block: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        from cuda.core import LaunchConfig, launch

        key = grid, block, shared_bytes
        configuration = self._configurations.get(key)
        if configuration is None:
            if shared_bytes > DEFAULT_SHARED_BYTES:
                self._kernel.attributes.max_dynamic_shared_size_bytes = shared_bytes
            configuration = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
            self._configurations[key] = configuration
        stream = self._launcher.current_stream()
        launch(stream, configuration, self._kernel, *map(argument, arguments))


class NumbaLauncher:
    """Compiles, loads and keeps kernels for one device."""

    def __init__(self, architecture: str, device_index: int) -> None:
        from cuda.core import Device

        Device(device_index).set_current()
        self._architecture = architecture
        self._kernels: dict[tuple[Any, ...], NumbaKernel] = {}
        self._streams: dict[int, Any] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int | str]) -> NumbaKernel:
        key = (source, name, tuple(sorted(defines.items())))
        found = self._kernels.get(key)
        if found is None:
            from cuda.core import ObjectCode

            entry, cubin = cached_kernel(source, name, defines, self._architecture)
            found = NumbaKernel(self, ObjectCode.from_cubin(cubin).get_kernel(entry))
            self._kernels[key] = found
        return found

    def current_stream(self) -> Any:
        """Return torch's stream of this moment: while a graph is recorded it is another one."""
        from cuda.core import Stream

        handle = torch.cuda.current_stream().cuda_stream
        if handle not in self._streams:
            self._streams[handle] = Stream.from_handle(handle)
        return self._streams[handle]
