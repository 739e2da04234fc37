"""The operations of headrace.interfaces.Ops on the CPU: torch for products, Numba kernels for the rest.

The residual stream and all arithmetic between products are f32; products take and give bf16 where oneDNN
packs bf16 weights. Kernels get addresses, so that no call builds array objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.cpu import kernels_elementwise as elementwise
from headrace.backends.cpu.kernels_attention import attend_parallel, attend_share
from headrace.backends.cpu.kernels_linear import product_parallel, product_share
from headrace.backends.cpu.kernels_rows import BF16, F16, F32
from headrace.backends.cpu.kv_pool import zero_plane
from headrace.backends.cpu.memory import available_memory
from headrace.backends.cpu.sampling import Sampler
from headrace.backends.cpu.step import CpuStep, plan
from headrace.backends.cpu.team import Team
from headrace.backends.cpu.weights import (
    PLAIN,
    PackedWeight,
    RowsWeight,
    can_pack,
    gather_rows,
    has_long_sums,
    is_vocabulary,
    pack,
    packed_linear,
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

Weight = PackedWeight | RowsWeight
FORMATS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


class CpuOps(TorchOps):
    """Implements headrace.interfaces.Ops. Used by one thread at a time."""

    schemes = frozenset(PLAIN)

    def __init__(self, settings: EngineSettings) -> None:
        """ConfigError where this backend does not know the dtype."""
        if settings.dtype not in DTYPES:
            raise ConfigError(
                f"backend 'cpu' computes in {', '.join(DTYPES)}; dtype is {settings.dtype!r}"
            )
        super().__init__(
            kv_dtype_of(settings.kv_dtype, DTYPES, "the reference path of backend 'cpu'")
        )
        self._team = Team(settings.num_threads)
        self._dtype = DTYPES[settings.dtype]
        packs = not settings.deterministic
        if packs and self._dtype == torch.float16:
            self._dtype = torch.float32
        self._packs = packs and can_pack(self._dtype)
        self._act_dtype = self._dtype if self._packs else torch.float32
        self._sampler = Sampler(self._team)

    # --- once, at load ----------------------------------------------------------

    def hold(self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None) -> Weight:
        held: Weight
        name = parts[0].name
        rows = gather_rows(parts, self._dtype)
        offset = None if bias is None else torch.tensor(bias)
        if self._packs and not is_vocabulary(name) and not has_long_sums(rows):
            offset = None if offset is None else offset.to(self._dtype)
            num_bytes = rows.nbytes + (0 if offset is None else offset.nbytes)
            held = PackedWeight(pack(rows), offset, num_bytes)
        else:
            held = RowsWeight(rows, offset)
        self._weight_bytes += held.num_bytes
        return held

    def hold_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        held = torch.tensor(values, dtype=torch.float32)
        self._weight_bytes += held.nbytes
        return held

    def rope_table(
        self, inverse_frequencies: NDArray[np.float64], scale: float, max_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [max_positions, rotary_dim / 2] f32."""
        frequencies = torch.tensor(inverse_frequencies, dtype=torch.float64)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies[None, :]
        return (angles.cos() * scale).float(), (angles.sin() * scale).float()

    # --- KV storage -------------------------------------------------------------

    def allocate_kv(self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int) -> None:
        for group in groups:
            if group.head_dim % 16:
                raise ConfigError(
                    f"backend 'cpu' supports head_dim 64, 80, 96, 128, 256 and other multiples of 16; "
                    f"KV group '{group.name}' has {group.head_dim}"
                )
        self._pool = KVPool(groups, num_blocks, block_size, self._kv_dtype, zero_plane)

    def available_bytes(self) -> int:
        return available_memory()

    # --- the forward ------------------------------------------------------------

    def plan_step(self, batch: ForwardBatch) -> CpuStep:
        self._team.join()
        return plan(batch, self._sampler.drawn)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            return packed_linear(x.to(self._dtype), weight.packed, weight.bias)
        rows = weight.rows
        out = torch.empty(len(x), len(rows))
        arguments = (
            *_row(x),
            rows.data_ptr(),
            FORMATS[rows.dtype],
            0 if weight.bias is None else weight.bias.data_ptr(),
            out.data_ptr(),
            out.stride(0) * 4,
            len(x),
            rows.shape[1],
            len(rows),
        )
        self._team.run(product_share, product_parallel, rows.nbytes, *arguments)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int = 1
    ) -> torch.Tensor:
        """A norm per head stays f32: only the rotation reads it."""
        out = torch.empty(x.shape, dtype=self._act_dtype if num_groups == 1 else torch.float32)
        self._norm(x, None, weight, eps, num_groups, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual.dtype != torch.float32:
            residual = residual.float()
        out = torch.empty(x.shape, dtype=self._act_dtype)
        self._norm(x, residual, weight, eps, 1, out)
        return out, residual

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        num_groups: int,
        out: torch.Tensor,
    ) -> None:
        kept = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0) * 4)
        num_rows, size = x.shape[0], x.shape[1] // num_groups
        arguments = (
            *_row(x), *kept, *_row(out), weight.data_ptr(), eps, num_rows, num_groups, size
        )  # fmt: skip
        self._team.run(elementwise.norm_share, elementwise.norm_parallel, x.numel(), *arguments)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.float().add_(x)

    def rope_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        step: CpuStep,
    ) -> torch.Tensor:
        kv = self._kv().layers[layer]
        num_kv_heads, head_dim = kv.keys.shape[2:]
        out = torch.empty(q.shape)
        cosines, sines = table
        arguments = (
            *_row(q), *_row(k), *_row(v), out.data_ptr(), out.stride(0) * 4,
            kv.keys.data_ptr(), kv.values.data_ptr(), FORMATS[self._kv_dtype],
            step.positions.data_ptr(), step.slots[kv.group].data_ptr(),
            cosines.data_ptr(), sines.data_ptr(),
            q.shape[0], q.shape[1] // head_dim, num_kv_heads, head_dim, cosines.shape[1],
        )  # fmt: skip
        self._team.run(elementwise.rope_share, elementwise.rope_parallel, q.numel(), *arguments)
        return out

    def paged_attention(
        self, q: torch.Tensor, layer: int, spec: AttentionSpec, step: CpuStep
    ) -> torch.Tensor:
        pool = self._kv()
        kv = pool.layers[layer]
        out = torch.empty(q.shape, dtype=self._act_dtype)
        arguments = (
            *_row(q), *_row(out), kv.keys.data_ptr(), kv.values.data_ptr(), FORMATS[self._kv_dtype],
            0 if kv.bias is None else kv.bias.data_ptr(), step.query_starts.data_ptr(),
            step.kv_lens[kv.group].data_ptr(), step.block_tables[kv.group].data_ptr(),
            step.num_sequences, step.table_width, pool.block_size, spec.num_kv_heads, spec.head_dim,
            spec.num_heads // spec.num_kv_heads, float(spec.scale), float(spec.softcap or 0.0),
            spec.sliding_window or 0,
        )  # fmt: skip
        work = step.num_scores * spec.num_heads * spec.head_dim
        self._team.run(attend_share, attend_parallel, work, *arguments)
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x, elementwise.SILU)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x, elementwise.GELU_TANH)

    def _gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        size = x.shape[1] // 2
        out = torch.empty((x.shape[0], size), dtype=self._act_dtype)
        arguments = (*_row(x), *_row(out), activation, x.shape[0], size)
        self._team.run(elementwise.gate_share, elementwise.gate_parallel, x.numel(), *arguments)
        return out

    def sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, masks: TokenMasks | None
    ) -> StepResult:
        return self._sampler.sample(logits.float(), sampling, masks)

    def synchronize(self) -> None:
        """Nothing is ever in flight."""


def _row(x: torch.Tensor) -> tuple[int, int, int]:
    """Address, format and row stride in bytes. The last axis must be contiguous."""
    assert x.stride(1) == 1 or x.shape[1] == 1, "an activation's rows are contiguous"
    return x.data_ptr(), FORMATS[x.dtype], x.stride(0) * x.element_size()
