"""The Numba kernels on the simulator, for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.backends.cuda_numba.launches import NumbaKernels
    from headrace.backends.gpu.device import Device
    from headrace.testing.cuda_numba import SimulatorLauncher

MISSING = [
    package
    for package, module in (("numba-cuda", "numba_cuda"), ("greenlet", "greenlet"))
    if importlib.util.find_spec(module) is None
]
needs_numba_cuda = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed; the extra 'kernels' has them"
)


def numba_kernels(
    modules: Mapping[str, ModuleType] | None = None, *, device: Device | None = None
) -> tuple[NumbaKernels, SimulatorLauncher]:
    """Return the kernels and the launcher that runs them on the CPU; `modules` replace some of them.

    `device`: what they plan for; None: an emulated one with nothing said about it.
    """
    from headrace.backends.cuda_numba.launches import NumbaKernels
    from headrace.testing.cuda_cpu.launcher import EmulatedDevice
    from headrace.testing.cuda_numba import SimulatorLauncher

    launcher = SimulatorLauncher(modules)
    return NumbaKernels(launcher, device or EmulatedDevice()), launcher
