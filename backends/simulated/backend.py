"""The simulated backend: an engine's scheduling and memory at any scale, without a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headrace.interfaces import Availability, Clock, Group, LoadedModel, QuantizationPolicy
from headrace.step_time import StepTimeFormula
from headrace.types import EngineSettings

if TYPE_CHECKING:
    from headrace.backends.simulated.runner import SimulatedRunner


class SimulatedBackend:
    """Runs no model: a step takes the time its formula gives, tokens are made up."""

    name: ClassVar[str] = "simulated"
    schemes: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True)
    class Options:
        """What a step costs, and how much memory the pretended device has."""

        base_seconds: float = 0.002
        seconds_per_prefill_token: float = 5e-5
        seconds_per_sequence: float = 2e-4
        seconds_per_kv_row: float = 2e-8
        weight_bytes: int = 0
        memory_bytes: int = 1 << 40
        runs_ahead: bool = False
        """Plan and launch each step while the one before it runs, as on a GPU."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True)

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        return cls(options if options is not None else cls.Options(), clock)

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> SimulatedRunner:
        """Read no weights, so `quantization` changes nothing here."""
        from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner

        options = self._options
        step_time = StepTimeFormula(
            options.base_seconds,
            options.seconds_per_prefill_token,
            options.seconds_per_sequence,
            options.seconds_per_kv_row,
        )
        return SimulatedRunner(
            groups=model.architecture.kv_groups(),
            vocab_size=model.architecture.vocab_size,
            settings=settings,
            clock=self._clock,
            device=SimulatedDevice(
                step_time, options.weight_bytes, options.memory_bytes, options.runs_ahead
            ),
        )
