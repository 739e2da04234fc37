"""The Runner of the GPU backends: steps are launched and not waited for, decodes replay CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
import torch

from headrace.backends.gpu.buckets import bucket_of, buckets
from headrace.backends.gpu.device import MEMORY_SHARE
from headrace.backends.gpu.draw import Fetch
from headrace.backends.gpu.graphs import DecodeStep, is_decode, try_capture
from headrace.backends.gpu.memory import device_memory, largest_step
from headrace.backends.gpu.ops import GpuOps
from headrace.backends.runner import OpsRunner
from headrace.errors import ModelError
from headrace.interfaces import Group, LoadedModel, QuantizationPolicy
from headrace.types import (
    DeviceMemory,
    EngineSettings,
    ForwardBatch,
    SamplingBatch,
    StepResult,
    TokenMasks,
)
from headrace.types.units import about_size

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Device


class GpuStepHandle:
    """A step in flight. Implements headrace.interfaces.StepHandle."""

    def __init__(self, ops: GpuOps, logits: torch.Tensor, sampling: SamplingBatch) -> None:
        self._ops = ops
        self._logits: torch.Tensor | None = logits
        self._sampling = sampling
        self._fetch: Fetch | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert self._logits is not None, "sample is called once per step"
        self._fetch = Fetch(self._ops.launch_draw(self._logits, self._sampling, masks))
        self._logits = None

    def result(self) -> StepResult:
        assert self._fetch is not None, "sample comes before result"
        return self._fetch.result()


class GpuRunner(OpsRunner):
    """Runs one model on one GPU. Implements headrace.interfaces.Runner."""

    runs_ahead = True

    def __init__(
        self,
        ops: GpuOps,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        """Hold the weights. `memory_share`: what measure_memory may give away of the device."""
        ops.set_query_heads(model.architecture.query_heads() // group.size)
        super().__init__(
            ops, model, group, settings, schemes=GpuOps.schemes, quantization=quantization,
            report=report,
        )  # fmt: skip
        self._gpu_ops = ops
        self._memory_share = memory_share
        self._model_name = model.name
        self._table_width = -(-settings.max_model_len // settings.block_size)
        self._decode_steps: dict[int, DecodeStep] = {}

    def measure_memory(self, num_replicas: int) -> DeviceMemory:
        """Run the largest step over a pool of one block and return what the device has left beside it.

        `num_replicas` share the device. Before allocate. ModelError where not even the step fits.
        """
        assert self._num_blocks == 0, "memory is measured before the pool takes its part"
        device, settings = self._gpu_ops.device, self._settings
        batch = largest_step(settings, len(self._groups), self._architecture.vocab_size)
        self._gpu_ops.allocate_kv(self._groups, 1, settings.block_size)
        try:
            activation_bytes = device.peak_of(lambda: self._run_once(batch))
            graph_bytes = self._graph_bytes(activation_bytes) if device.can_capture else 0
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the largest step of '{self._model_name}' does not fit the device's "
                f"{about_size(device.total_bytes())} beside {about_size(self._ops.weight_bytes())} of weights: "
                f"lower models.*.engine.max_batched_tokens ({settings.max_batched_tokens}) or "
                f"max_num_sequences ({settings.max_num_sequences}): {str(error).splitlines()[0]}"
            ) from error
        finally:
            self._gpu_ops.release_kv()
        return device_memory(
            device,
            weight_bytes=self._ops.weight_bytes(),
            activation_bytes=activation_bytes,
            graph_bytes=graph_bytes,
            memory_share=self._memory_share,
            num_replicas=num_replicas,
        )

    def allocate(self, num_blocks: int) -> None:
        """ModelError where the device cannot give what the sum said, as planes are rounded up."""
        try:
            super().allocate(num_blocks)
        except torch.OutOfMemoryError as error:
            device, pool = self._gpu_ops.device, num_blocks * self.memory().kv_bytes_per_block
            raise ModelError(
                f"a KV pool of {num_blocks} blocks ({about_size(pool)}) "
                f"does not fit the {about_size(device.free_bytes())} free of the device's "
                f"{about_size(device.total_bytes())}: give less in models.*.engine.kv_memory, or lower "
                "models.*.backend.options.memory_share"
            ) from error

    def _graph_bytes(self, activation_bytes: int) -> int:
        """Return what recorded steps will keep: activations that all share, each its tensors and logits."""
        row_bytes = 4 * self._architecture.vocab_size
        return activation_bytes + sum(
            DecodeStep(self._gpu_ops, bucket, self._table_width).num_bytes() + bucket * row_bytes
            for bucket in buckets(self._settings.max_num_sequences)
        )

    def _run_once(self, batch: ForwardBatch) -> None:
        handle = self.execute(batch)
        handle.sample()
        handle.result()

    def warm_up(self, report: Callable[[float], None]) -> None:
        """Compile and run every kernel once, then record a decode step per bucket."""
        super().warm_up(lambda fraction: report(fraction / 2))
        device: Device = self._gpu_ops.device
        if not device.can_capture:
            structlog.get_logger(__name__).info(
                "decode steps run without CUDA graphs", reason="the device does not record"
            )
            report(1.0)
            return
        sizes = buckets(self._settings.max_num_sequences)
        pool = torch.cuda.graph_pool_handle()
        for done, bucket in enumerate(
            reversed(sizes)
        ):  # the largest first: the others fit its memory
            report(0.5 + done / len(sizes) / 2)
            step = DecodeStep(self._gpu_ops, bucket, self._table_width)
            step.run(self._forward, bucket)
            self._gpu_ops.synchronize()
            if not try_capture(step, self._forward, bucket, pool):
                break
            self._decode_steps[bucket] = step
        report(1.0)

    def execute(self, batch: ForwardBatch) -> GpuStepHandle:  # type: ignore[override]
        """Launch the forward: replayed where it is a step of decodes whose bucket is recorded."""
        assert not self._is_closed, "the runner is closed"
        step = None
        if self._decode_steps and is_decode(batch):
            bucket = bucket_of(len(batch.token_ids), self._settings.max_num_sequences)
            step = None if bucket is None else self._decode_steps.get(bucket)
        if step is None:
            logits = self._forward(self._gpu_ops.plan_step(batch))
        else:
            step.fill(batch)
            logits = step.run(self._forward, len(batch.token_ids))
        return GpuStepHandle(self._gpu_ops, logits, batch.sampling)

    def close(self) -> None:
        if not self._is_closed:
            self._decode_steps.clear()
            super().close()

    def _forward(self, step: Any) -> torch.Tensor:
        logits: torch.Tensor = self._architecture.forward(
            self._gpu_ops, self._group, self._weights, step
        )
        return logits
