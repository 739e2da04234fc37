"""The CPU backend: the embedded default, on torch's products and Numba kernels.

torch and Numba are imported by `open`, so that naming this backend costs nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy, Runner
from headrace.types import EngineSettings


class CpuBackend:
    """Implements headrace.interfaces.Backend."""

    name: ClassVar[str] = "cpu"
    schemes: ClassVar[frozenset[str]] = frozenset({"f32", "f16", "bf16"})

    @dataclass(frozen=True, slots=True)
    class Options:
        """Nothing to choose: threads and dtypes are the engine's settings."""

    @classmethod
    def probe(cls) -> Availability:
        for package in ("torch", "numba"):
            if importlib.util.find_spec(package) is None:
                return Availability(False, f"the package {package} is not installed")
        return Availability(True)

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        """There is one CPU: `device_index` is 0."""
        from headrace.backends.cpu import ops  # noqa: F401  (fails here, before a model is read)

        return cls()

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Runner:
        from headrace.backends.cpu.ops import CpuOps
        from headrace.backends.runner import OpsRunner

        return OpsRunner(
            CpuOps(settings),
            model,
            group,
            settings,
            schemes=self.schemes,
            quantization=quantization,
            report=report,
        )
