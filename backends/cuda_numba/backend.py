"""The backend `cuda_numba`: kernels in Numba CUDA, launched through cuda.core, torch for the rest.

Nothing of Numba's CUDA target is imported before `open`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.backends.gpu.backend import GpuBackend

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Device
    from headrace.backends.gpu.kernels import Kernels


class CudaNumbaBackend(GpuBackend):
    """Implements headrace.interfaces.Backend."""

    name: ClassVar[str] = "cuda_numba"
    extra = "cuda-numba"
    modules: ClassVar = {"torch": "torch", "numba_cuda": "numba-cuda[cu13]"}

    def _make_kernels(self, device: Device) -> Kernels:
        from headrace.backends.cuda_numba.launcher import NumbaLauncher
        from headrace.backends.cuda_numba.launches import NumbaKernels

        return NumbaKernels(NumbaLauncher(device.architecture, device.torch_device.index), device)
