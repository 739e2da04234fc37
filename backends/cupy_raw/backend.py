"""The backend `cupy_raw`: CUDA C++ kernels compiled by NVRTC and loaded through CuPy, torch for the rest.

Nothing of CuPy or CUDA is imported before `open`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.backends.gpu.backend import GpuBackend

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Device
    from headrace.backends.gpu.kernels import Kernels


class CupyRawBackend(GpuBackend):
    """Implements headrace.interfaces.Backend."""

    name: ClassVar[str] = "cupy_raw"
    extra = "cupy"
    modules: ClassVar = {"torch": "torch", "cupy": "cupy-cuda13x"}

    def _make_kernels(self, device: Device) -> Kernels:
        from headrace.backends.cupy_raw.launcher import CupyLauncher
        from headrace.backends.cupy_raw.launches import CudaKernels

        return CudaKernels(CupyLauncher(device.architecture), device)
