"""The operations of headrace.interfaces.Ops on a GPU: torch's dense products, a backend's kernels for the rest.

The residual stream is f32; what goes into a product is in the activations' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.gpu.device import Device
from headrace.backends.gpu.draw import fetch_result, upload_draw
from headrace.backends.gpu.kernels import GELU_TANH, SILU, Draw, Kernels
from headrace.backends.gpu.prefill import LongAttention
from headrace.backends.gpu.step import GpuStep, GroupShape, upload_step
from headrace.backends.gpu.weights import (
    SCHEMES,
    DenseWeight,
    Weight,
    bytes_of,
    dense_rows,
    hold_weight,
)
from headrace.backends.torch_kv_pool import KVPool, kv_dtype_of
from headrace.backends.torch_ops import DTYPES, TorchOps
from headrace.errors import ConfigError
from headrace.interfaces import AttentionSpec
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    SamplingBatch,
    StepResult,
    TokenMasks,
    WeightPart,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
MAX_QUANTIZED_ROWS = 8
"""Rows of x up to which `quantized_linear` multiplies codes; beyond, they are expanded for torch."""


class GpuOps(TorchOps):
    """Implements headrace.interfaces.Ops. Used by one thread at a time."""

    schemes = SCHEMES

    def __init__(
        self, kernels: Kernels, device: Device, settings: EngineSettings, backend: str
    ) -> None:
        """ConfigError where the GPU backends do not know a dtype."""
        if settings.dtype not in DTYPES:
            raise ConfigError(
                f"backend '{backend}' computes in {', '.join(DTYPES)}; dtype is {settings.dtype!r}"
            )
        super().__init__(kv_dtype_of(settings.kv_dtype, KV_DTYPES, f"backend '{backend}'"))
        self.kernels = kernels
        self.device = device
        self.dtype = DTYPES[settings.dtype]
        self._long_attention = LongAttention()
        self._query_heads = 0
        self._groups: tuple[KVGroupSpec, ...] = ()
        self.drawn = torch.zeros(1, dtype=torch.int32, device=device.torch_device)

    def set_query_heads(self, num_heads: int) -> None:
        """Say how many query heads a layer has: planning needs it before the first attention."""
        self._query_heads = num_heads

    # --- once, at load ----------------------------------------------------------

    def hold(self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None) -> Weight:
        held = hold_weight(parts, bias, self.dtype, self.device.torch_device)
        self._weight_bytes += bytes_of(held)
        return held

    def hold_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        held = torch.tensor(values, dtype=torch.float32, device=self.device.torch_device)
        self._weight_bytes += held.nbytes
        return held

    def rope_table(
        self, inverse_frequencies: NDArray[np.float64], scale: float, max_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [max_positions, rotary_dim / 2] f32."""
        angles = np.arange(max_positions)[:, None] * inverse_frequencies[None, :]
        cosines, sines = (
            torch.tensor(part, dtype=torch.float32, device=self.device.torch_device)
            for part in (np.cos(angles) * scale, np.sin(angles) * scale)
        )
        return cosines, sines

    # --- KV storage -------------------------------------------------------------

    def allocate_kv(self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int) -> None:
        self._groups = tuple(groups)
        device = self.device.torch_device

        def zero_plane(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._pool = KVPool(groups, num_blocks, block_size, self._kv_dtype, zero_plane)

    def release_kv(self) -> None:
        """Let go of the KV pool: another one may be allocated."""
        self._pool = None

    def available_bytes(self) -> int:
        return self.device.free_bytes()

    # --- the forward ------------------------------------------------------------

    def group_shapes(self) -> tuple[GroupShape, ...]:
        """Return what planning must know of each KV group."""
        assert self._query_heads, "set_query_heads comes before plan_step"
        shapes = []
        for spec in self._groups:
            kv = self.layers[spec.layers[0]]
            attention = AttentionSpec(
                self._query_heads, spec.num_kv_heads, spec.head_dim, 1.0, spec.sliding_window
            )
            shapes.append(
                GroupShape(
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    group=self._query_heads // spec.num_kv_heads,
                    window=spec.sliding_window,
                    tile_tokens=self.kernels.tile_tokens(attention, kv, self.dtype),
                )
            )
        return tuple(shapes)

    def plan_step(self, batch: ForwardBatch) -> GpuStep:
        pool = self._kv()
        return upload_step(
            batch,
            self.group_shapes(),
            pool.block_size,
            self.drawn,
            self.device.num_multiprocessors,
        )

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, DenseWeight):
            return self._logits(x, weight) if weight.is_vocabulary else _dense(x, weight)
        if len(x) <= MAX_QUANTIZED_ROWS:
            out = torch.empty(len(x), len(weight.codes), dtype=self.dtype, device=x.device)
            if len(
                x
            ):  # a chunk of a prompt may have no samples: nothing can be launched for no rows
                self.kernels.quantized_linear(x, weight, out)
            return out
        bias = None if weight.bias is None else weight.bias.to(self.dtype)
        return _dense(x, DenseWeight(dense_rows(weight, self.dtype), bias, False))

    def _logits(self, x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.rows.T, out_dtype=torch.float32)
        return x.float() @ weight.rows.float().T

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int = 1
    ) -> torch.Tensor:
        """A norm per head stays f32: only the rotation reads it."""
        dtype = self.dtype if num_groups == 1 else torch.float32
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if len(x):
            self.kernels.rms_norm(x, None, weight, eps, num_groups, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if len(x):
            self.kernels.rms_norm(x, residual, weight, eps, 1, out)
        return out, residual

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(x)

    def rope_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        step: GpuStep,
    ) -> torch.Tensor:
        kv = self._kv().layers[layer]
        out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        slots = step.groups[kv.group].slots
        self.kernels.rope_write_kv((q, k, v), table, kv, step.positions, slots, out)
        return out

    def paged_attention(
        self, q: torch.Tensor, layer: int, spec: AttentionSpec, step: GpuStep
    ) -> torch.Tensor:
        kv = self._kv().layers[layer]
        group = step.groups[kv.group]
        out = torch.empty_like(q)
        if group.work is not None:
            self.kernels.paged_attention(q, kv, spec, group.work, out)
        for sequence in group.long:
            self._long_attention.attend(q, kv, spec, sequence, out)
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x, SILU)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x, GELU_TANH)

    def _gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        out = torch.empty(len(x), x.shape[1] // 2, dtype=self.dtype, device=x.device)
        if len(x):
            self.kernels.gate(x, activation, out)
        return out

    def launch_draw(
        self, logits: torch.Tensor, sampling: SamplingBatch, masks: TokenMasks | None
    ) -> Draw:
        """Launch the draw; the next step's `token_sources` name its rows."""
        draw = upload_draw(sampling, masks, logits.shape[1], logits.device)
        if len(logits):
            self.kernels.sample(logits, draw)
        self.drawn = draw.token_ids
        return draw

    def sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, masks: TokenMasks | None
    ) -> StepResult:
        return fetch_result(self.launch_draw(logits, sampling, masks))

    def synchronize(self) -> None:
        self.device.synchronize()


def _dense(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.rows, weight.bias)
