"""What the GPU backends share: a device, and a runner over their own kernels.

Nothing heavy is imported before `open`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import structlog

from headrace.backends.gpu.probe import probe_gpu
from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy, Runner
from headrace.types import EngineSettings

if TYPE_CHECKING:
    from headrace.backends.gpu.cuda_device import CudaDevice
    from headrace.backends.gpu.kernels import Kernels


class GpuBackend(ABC):
    """Implements headrace.interfaces.Backend for a subclass that names itself and makes its kernels."""

    name: ClassVar[str]
    extra: ClassVar[str]
    """Headrace's extra that installs what is needed."""
    modules: ClassVar[Mapping[str, str]]
    """Module that must be there -> the package that brings it."""
    schemes: ClassVar[frozenset[str]] = frozenset({"f32", "f16", "bf16", "q8_0", "q4_1"})

    @dataclass(frozen=True, slots=True)
    class Options:
        """Nothing to choose: dtypes and sizes are the engine's settings."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._kernels = self._make_kernels(device)

    @classmethod
    def probe(cls) -> Availability:
        return probe_gpu(cls.modules, cls.extra)

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        from headrace.backends.gpu.cuda_device import CudaDevice

        device = CudaDevice(device_index)
        structlog.get_logger(__name__).info(
            "device", name=device.name, architecture=device.architecture, index=device_index
        )
        return cls(device)

    @abstractmethod
    def _make_kernels(self, device: CudaDevice) -> Kernels:
        """Return the backend's kernels with a launcher for this device."""

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Runner:
        from headrace.backends.gpu.ops import GpuOps
        from headrace.backends.gpu.runner import GpuRunner

        ops = GpuOps(self._kernels, self._device, settings, self.name)
        return GpuRunner(ops, model, group, settings, quantization=quantization, report=report)
