"""The CPU backend, the embedded default: a recorded program in one parallel region, or torch's products.

Each model gets the path that can run it, decided once. Nothing heavy is imported before that, so that naming
this backend costs nothing; torch only for the reference path. `open` shortens how
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

import structlog

from headrace.errors import ConfigError
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
        reason = _reason_against_fast_path(settings, group)
        if not reason:
            from headrace.backends.cpu.fast.packing import UnsupportedModel
            from headrace.backends.cpu.fast.runner import FastRunner

            try:
                return FastRunner(model, group, settings, quantization=quantization, report=report)
            except UnsupportedModel as unsupported:
                reason = str(unsupported)
        if settings.activations == "int8":
            raise ConfigError(
                f"models.*.engine.activations is {settings.activations}, which only the CPU's fast path "
                f"computes, and that cannot serve '{model.name}' here: {reason}; set it to precise"
            )
        if settings.kv_dtype == "int8":
            raise ConfigError(
                f"engine.kv_dtype is 'int8', which only the fast path of backend 'cpu' keeps, and it cannot "
                f"serve model '{model.name}' here: {reason}; write kv_dtype: auto"
            )
        structlog.get_logger(__name__).info("reference path", model=model.name, reason=reason)
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


def _reason_against_fast_path(settings: EngineSettings, group: Group) -> str:
    """Return why the reference path must serve; "" where the fast one can."""
    from headrace.backends.cpu.fast import capability

    if capability.level() == capability.REFERENCE:
        return f"{capability.VARIABLE} is {capability.REFERENCE}"
    from headrace.backends.cpu.fast.runner import reason_against

    return reason_against(settings, group)
