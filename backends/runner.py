"""The one Runner that runs any ModelArchitecture on any Ops.

It holds the weights and decides nothing: a step is plan, forward and draw, the KV pool is the Ops' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.backends.quantized import quantized
from headrace.backends.warm_up import warm_up_steps
from headrace.interfaces import Group, LoadedModel, LoadSettings, Ops, QuantizationPolicy
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    SamplingBatch,
    StepResult,
    TokenMasks,
    WeightPart,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class OpsStepHandle:
    """A step whose forward is launched. Implements headrace.interfaces.StepHandle."""

    def __init__(self, ops: Ops, logits: Any, sampling: SamplingBatch) -> None:
        self._ops = ops
        self._logits = logits
        self._sampling = sampling
        self._result: StepResult | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert self._result is None, "sample is called once per step"
        self._result = self._ops.sample(self._logits, self._sampling, masks)
        self._logits = None

    def result(self) -> StepResult:
        assert self._result is not None, "sample comes before result"
        self._ops.synchronize()
        return self._result


class OpsRunner:
    """Runs one model on one device. Implements headrace.interfaces.Runner."""

    def __init__(
        self,
        ops: Ops,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        schemes: frozenset[str],
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        """Hold the model's weights. `schemes`: what `ops.hold` takes as stored (the backend's own list).

        `report("load", fraction)` is told how far it is. Raises ModelError where a tensor is absent
        or misshapen, or where `quantization` wants a scheme that this runner cannot make.
        """
        model = quantized(model, quantization)
        self._ops = ops
        self._group = group
        self._settings = settings
        self._architecture = model.architecture
        self._groups = tuple(share_of(spec, group) for spec in model.architecture.kv_groups())
        self._num_blocks = 0
        self._is_closed = False

        def expand(part: WeightPart) -> WeightPart:
            return part if part.scheme in schemes else model.expand(part)

        load = LoadSettings(
            max_positions=settings.max_model_len,
            expand=expand,
            schemes=schemes,
            report=lambda fraction: report("load", fraction),
        )
        self._weights: Any = model.architecture.load(ops, model.tensors, group, load)

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return self._groups

    def memory(self) -> MemoryReport:
        per_block = self._ops.kv_bytes_per_block(self._groups, self._settings.block_size)
        return MemoryReport(
            weight_bytes=self._ops.weight_bytes(),
            kv_bytes_per_block=per_block,
            kv_pool_bytes=per_block * self._num_blocks,
            available_bytes=self._ops.available_bytes(),
        )

    def allocate(self, num_blocks: int) -> None:
        assert self._num_blocks == 0, "the KV pool is allocated once"
        self._ops.allocate_kv(self._groups, num_blocks, self._settings.block_size)
        self._num_blocks = num_blocks

    def warm_up(self, report: Callable[[float], None]) -> None:
        assert self._num_blocks > 0, "allocate comes before warm_up"
        steps = warm_up_steps(
            self._settings,
            num_groups=len(self._groups),
            num_blocks=self._num_blocks,
            vocab_size=self._architecture.vocab_size,
        )
        for done, (batch, masks) in enumerate(steps):
            report(done / len(steps))
            handle = self.execute(batch)
            handle.sample(masks)
            handle.result()
        last = self._num_blocks - 1
        self.copy_blocks([(0, last)])
        self.write_rows(self._groups[0].layers[0], [0], *self.read_rows(0, [0]))
        report(1.0)

    def execute(self, batch: ForwardBatch) -> OpsStepHandle:
        assert not self._is_closed, "the runner is closed"
        step = self._ops.plan_step(batch)
        logits = self._architecture.forward(self._ops, self._group, self._weights, step)
        return OpsStepHandle(self._ops, logits, batch.sampling)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._ops.copy_blocks(pairs)

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._ops.read_rows(layer, slots)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        self._ops.write_rows(layer, slots, keys, values)

    def close(self) -> None:
        """Wait for what is in flight and let go of the weights; the pool goes with the Ops."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ops.synchronize()
        self._weights = None
        del self._ops


def share_of(spec: KVGroupSpec, group: Group) -> KVGroupSpec:
    """What one rank stores of a group of layers: its share of the heads."""
    return msgspec.structs.replace(spec, num_kv_heads=spec.num_kv_heads // group.size)
