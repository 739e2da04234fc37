"""The Numba kernels on the simulator: a Launcher that runs them on tensors in host memory."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numba.cuda
import numpy as np
import torch
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels import formats
from headrace.backends.cuda_numba.kernels.source import KernelSource
from headrace.testing import cuda_primitives
from headrace.testing.cuda_simulator import DeviceArray, SimulatedCuda, rebound, run_grid

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Dimensions

NUMBERS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
)  # fmt: skip
KERNELS = "headrace.backends.cuda_numba.kernels"
PLAIN: Mapping[int, Any] = {
    id(numba.cuda): SimulatedCuda(),
    **{id(getattr(types, name)): getattr(np, name) for name in NUMBERS},
    **{id(getattr(primitives, name)): getattr(cuda_primitives, name) for name in primitives.NAMES},
    **{id(getattr(formats, name)): getattr(cuda_primitives, name) for name in formats.STAND_INS},
}


class SimulatedKernel:
    """One specialised kernel. Implements headrace.backends.gpu.device.Kernel."""

    def __init__(self, launcher: SimulatorLauncher, name: str, source: KernelSource) -> None:
        self._launcher = launcher
        self._name = name
        self._source = source
        self._function = rebound(source.function, PLAIN)

    def __call__(
        self, grid: Dimensions, block: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Run the kernel to its end. SimulatorError says which rule it broke."""
        if (block, shared_bytes) != (self._source.num_threads, self._source.shared_bytes):
            raise ValueError(
                f"{self._name}: launched with {block} threads and {shared_bytes} bytes of shared memory, "
                f"made for {self._source.num_threads} and {self._source.shared_bytes}"
            )
        if min(grid) < 1:
            raise ValueError(
                f"{self._name}: launched with a grid of {grid}, which a device refuses"
            )
        wanted = self._source.signature.args
        names = self._source.function.__code__.co_varnames
        given = [
            _argument(value, kind, name)
            for value, kind, name in zip(arguments, wanted, names, strict=False)
        ]
        if len(arguments) != len(wanted):
            raise ValueError(f"{self._name}: {len(arguments)} arguments, it takes {len(wanted)}")
        self._launcher.num_launches += 1
        order, seed = self._launcher.order, self._launcher.seed
        run_grid(
            self._function, grid, block, given, shared_bytes=shared_bytes, order=order, seed=seed
        )


class SimulatorLauncher:
    """Runs kernels on the CPU. Mutable: `order` and `seed` are the next launch's."""

    def __init__(self, modules: Mapping[str, ModuleType] | None = None) -> None:
        """`modules` take the place of modules of kernels, by name: with a fault planted, say."""
        self.order, self.seed, self.num_launches = "forward", 0, 0
        self._modules = modules or {}
        self._kernels: dict[Any, SimulatedKernel] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int | str]) -> SimulatedKernel:
        key = source, name, tuple(sorted(defines.items()))
        if key not in self._kernels:
            module = self._modules.get(source) or importlib.import_module(f"{KERNELS}.{source}")
            self._kernels[key] = SimulatedKernel(self, name, getattr(module, name)(**defines))
        return self._kernels[key]


def changed_module(source: str, old: str, new: str, occurrence: int = 0) -> ModuleType:
    """Return a module of kernels with one occurrence of `old` in its text exchanged.

    ValueError where there is none.
    """
    path = Path(str(importlib.import_module(f"{KERNELS}.{source}").__file__))
    parts = path.read_text().split(old)
    if occurrence + 1 >= len(parts):
        raise ValueError(f"{path.name} has {len(parts) - 1} of {old!r}; {occurrence} counts from 0")
    head, tail = old.join(parts[: occurrence + 1]), old.join(parts[occurrence + 1 :])
    module = ModuleType(f"{source}_changed")
    exec(compile(head + new + tail, str(path), "exec"), module.__dict__)
    return module


def _argument(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(kind, types.CPointer):
        expected = np.dtype(str(kind))
        if not isinstance(value, np.generic) or value.dtype != expected:
            raise TypeError(f"argument {name} is {value!r}; the kernel takes a NumPy {expected}")
        return value
    pointee = np.dtype(str(kind.dtype))
    if value is None:
        return DeviceArray(np.zeros(0, pointee), name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"argument {name} is a {type(value).__name__}; the kernel takes a tensor")
    if value.numel() == 0:
        return DeviceArray(np.zeros(0, pointee), name)
    strides = zip(value.shape, value.stride(), strict=True)
    extent = (1 + sum((size - 1) * stride for size, stride in strides)) * value.element_size()
    memory = (ctypes.c_ubyte * extent).from_address(value.data_ptr())
    return DeviceArray(np.ctypeslib.as_array(memory).view(pointee), name)
