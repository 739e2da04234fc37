"""The backend `cuda_numba`: kernels in Numba CUDA, launched through cuda.core, torch for the rest.

Nothing of Numba's CUDA target is imported before `open`.
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
    from headrace.backends.cuda_numba.launcher import NumbaLauncher
    from headrace.backends.gpu.cuda_device import CudaDevice

MODULES = {"torch": "torch", "numba_cuda": "numba-cuda[cu13]"}


class CudaNumbaBackend:
    """Implements headrace.interfaces.Backend."""

    name: ClassVar[str] = "cuda_numba"
    schemes: ClassVar[frozenset[str]] = frozenset({"f32", "f16", "bf16", "q8_0", "q4_1"})

    @dataclass(frozen=True, slots=True)
    class Options:
        """Nothing to choose: dtypes and sizes are the engine's settings."""

    def __init__(self, device: CudaDevice, launcher: NumbaLauncher) -> None:
        self._device = device
        self._launcher = launcher

    @classmethod
    def probe(cls) -> Availability:
        return probe_gpu(MODULES, "cuda-numba")

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        from headrace.backends.cuda_numba.launcher import NumbaLauncher
        from headrace.backends.gpu.cuda_device import CudaDevice

        device = CudaDevice(device_index)
        structlog.get_logger(__name__).info(
            "device", name=device.name, architecture=device.architecture, index=device_index
        )
        return cls(device, NumbaLauncher(device.architecture, device_index))

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Runner:
        from headrace.backends.cuda_numba.launches import NumbaKernels
        from headrace.backends.gpu.ops import GpuOps
        from headrace.backends.gpu.runner import GpuRunner

        ops = GpuOps(NumbaKernels(self._launcher, self._device), self._device, settings, self.name)
        return GpuRunner(ops, model, group, settings, quantization=quantization, report=report)
