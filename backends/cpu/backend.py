"""The CPU backend: the embedded default, on torch's products and Numba kernels.

torch and Numba are imported by `open`, so that naming this backend costs nothing. Before that it shortens how
long the OpenMP runtime's idle threads spin: on a busy machine a spinning thread is descheduled just
when it is needed. Seen with 2 threads on 2 busy cores, one step of 16 rows: 60 to 1,500 ms with
the runtime's default, 21 to 115 ms with this.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy, Runner
from headrace.types import EngineSettings

SPIN_COUNT = "1000"
OPENMP_VARIABLES = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
"""Where the user has set one of these, it stays as it is. Read once, when torch is first imported."""


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
        if not OPENMP_VARIABLES & os.environ.keys():
            os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
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
