"""The backend `cupy_raw`: CUDA C++ kernels compiled by NVRTC and loaded through CuPy, torch for the rest.

Nothing of CuPy or CUDA is imported before `open`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import structlog

from headrace.backends.gpu.probe import probe_gpu
from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy, Runner
from headrace.types import EngineSettings

if TYPE_CHECKING:
    from headrace.backends.gpu.cuda_device import CudaDevice

MODULES = {"torch": "torch", "cupy": "cupy-cuda13x"}


class CupyRawBackend:
    """Implements headrace.interfaces.Backend."""

    name: ClassVar[str] = "cupy_raw"
    schemes: ClassVar[frozenset[str]] = frozenset({"f32", "f16", "bf16", "q8_0", "q4_1"})

    @dataclass(frozen=True, slots=True)
    class Options:
        """Nothing to choose: dtypes and sizes are the engine's settings."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    @classmethod
    def probe(cls) -> Availability:
        return probe_gpu(MODULES, "cupy")

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        from headrace.backends.gpu.cuda_device import CudaDevice

        device = CudaDevice(device_index)
        structlog.get_logger(__name__).info(
            "device", name=device.name, architecture=device.architecture, index=device_index
        )
        return cls(device)

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Runner:
        from headrace.backends.cupy_raw.launcher import CupyLauncher
        from headrace.backends.cupy_raw.launches import CudaKernels
        from headrace.backends.gpu.ops import GpuOps
        from headrace.backends.gpu.runner import GpuRunner

        kernels = CudaKernels(CupyLauncher(self._device.architecture), self._device)
        ops = GpuOps(kernels, self._device, settings, self.name)
        return GpuRunner(ops, model, group, settings, quantization=quantization, report=report)
