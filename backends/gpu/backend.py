"""What the GPU backends share: a device, and a runner over their own kernels.

Nothing heavy is imported before `open`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import structlog

from headrace.backends.gpu.device import MEMORY_SHARE
from headrace.backends.gpu.probe import probe_gpu
from headrace.errors import ModelError
from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy, Runner
from headrace.types import EngineSettings
from headrace.types.units import Bounds, about_size

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Device
    from headrace.backends.gpu.kernels import Kernels


class GpuBackend(ABC):
    """Implements headrace.interfaces.Backend for a subclass that names itself and makes its kernels."""

    name: ClassVar[str]
    extra: ClassVar[str]
    """Headrace's extra that installs what is needed."""
    modules: ClassVar[Mapping[str, str]]
    """Module that must be there -> the package that brings it."""
    has_own_memory: ClassVar[bool] = True
    schemes: ClassVar[frozenset[str]] = frozenset({"f32", "f16", "bf16", "q8_0", "q4_1"})

    @dataclass(frozen=True, slots=True)
    class Options:
        """What is the device's; dtypes and sizes are the engine's settings."""

        memory_share: Annotated[float, Bounds(0.01, 1.0)] = MEMORY_SHARE
        """Part of the device's memory to use at most, weights included; other servers say GPU utilization."""

    def __init__(self, device: Device, options: Options | None = None) -> None:
        self._device = device
        self._options = options or self.Options()
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
        return cls(device, options)

    @abstractmethod
    def _make_kernels(self, device: Device) -> Kernels:
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
        """ModelError where the weights do not fit the device."""
        import torch

        from headrace.backends.gpu.ops import GpuOps
        from headrace.backends.gpu.runner import GpuRunner

        ops = GpuOps(self._kernels, self._device, settings, self.name)
        try:
            return GpuRunner(
                ops, model, group, settings, quantization=quantization, report=report,
                memory_share=self._options.memory_share,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            total, free = self._device.total_bytes(), self._device.free_bytes()
            raise ModelError(
                f"the weights of '{model.name}' do not fit the device's {about_size(total)}: "
                f"{about_size(ops.weight_bytes())} of them are held and {about_size(free)} are free. "
                "Hold them in fewer bits (models.*.policies.quantization), or take a larger device"
            ) from error
