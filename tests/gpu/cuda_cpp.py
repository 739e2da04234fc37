"""The CUDA C++ kernels on the test bed, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import headrace.backends.cupy_raw
from headrace.backends.cupy_raw.launches import CudaKernels
from headrace.backends.gpu.device import Device
from headrace.testing.cuda_cpu.launcher import CpuLauncher, EmulatedDevice, missing_tools

FOLDER = Path(headrace.backends.cupy_raw.__file__).parent / "cuda"
_reason = missing_tools()
needs_cuda_cpp = pytest.mark.skipif(bool(_reason), reason=f"CUDA C++ on the CPU: {_reason}")


def cuda_kernels(
    defines: Mapping[str, int | str] | None = None,
    sanitize: str = "",
    *,
    device: Device | None = None,
) -> tuple[CudaKernels, CpuLauncher]:
    """Return the kernels, compiled with `defines` on top (a planted fault), and their launcher.

    `device`: what they plan for; None: an emulated one with nothing said about it.
    """
    launcher = CpuLauncher(FOLDER, sanitize=sanitize, extra_defines=defines)
    return CudaKernels(launcher, device or EmulatedDevice()), launcher
