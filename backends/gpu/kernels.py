"""The kernels that a GPU backend writes itself, as `GpuOps` calls them. One class per backend implements this.

Tensors are on the device, the last axis contiguous; rows of q, k, v and x may have a stride. `DeviceWork` and
`Draw` are uploaded by GpuOps. Scratch comes from torch's allocator; nothing here copies from the host or waits,
so that everything can be recorded into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.backends.torch_kv_pool import KVLayer
from headrace.interfaces import AttentionSpec

if TYPE_CHECKING:
    import torch

SILU, GELU_TANH = 0, 1
MAX_QUERY_ROWS = 16
"""Query tokens x heads per KV head that `paged_attention` takes of one sequence; longer runs go to torch."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One KV group's work list on the device (`headrace.backends.gpu.work_list` says the columns)."""

    pieces: torch.Tensor  # [capacity, 8] i4
    merges: torch.Tensor  # [max_tokens, 4] i4
    counts: torch.Tensor  # [2] i4
    block_table: torch.Tensor  # [S, B] i4
    partial_rows: (
        torch.Tensor
    )  # [capacity * kv heads * query rows of a tile * head_dim] f32 at least
    partial_sums: torch.Tensor  # [the same without head_dim, 2] f32: maximum (base 2), sum
    tile_tokens: int


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear weight in groups of 32 inputs: value = scale * code (+ minimum)."""

    codes: (
        torch.Tensor
    )  # q8_0: [out, in] i1; q4_1: [out, in / 2] u1, a group's 16 bytes hold 0-15 low, 16-31 high
    scales: torch.Tensor  # [out, in / 32] f16
    minima: torch.Tensor | None  # the same; q4_1 only
    bias: torch.Tensor | None  # [out] f32
    in_size: int


@dataclass(frozen=True, slots=True)
class Draw:
    """One step's sampling arguments on the device, and where results go (columns: `sampling_arguments`)."""

    floats: torch.Tensor  # [R, 6] f32
    ints: torch.Tensor  # [R, 8] i4
    seeds: torch.Tensor  # [R] i8, the bits of a u64
    positions: torch.Tensor  # [R] i8
    history_ids: torch.Tensor  # i4
    history_counts: torch.Tensor  # i4
    bias_ids: torch.Tensor  # i4
    bias_values: torch.Tensor  # f32
    masks: torch.Tensor  # [M, ceil(vocab / 32)] i4
    adjusts: bool
    filters_by_count: bool
    filters_by_mass: bool
    most_logprobs: int
    token_ids: torch.Tensor  # [R] i4, out
    failed: torch.Tensor  # [R] i4, out
    logprobs: torch.Tensor  # [R] f32, out
    top_token_ids: torch.Tensor  # [R, max(1, most_logprobs)] i4, out, filled with -1
    top_logprobs: torch.Tensor  # the same f32, out, filled with 0


class Kernels(Protocol):
    """What differs between the GPU backends."""

    def tile_tokens(self, spec: AttentionSpec, kv: KVLayer, dtype: torch.dtype) -> int:
        """Return how many query tokens one piece of work takes: 1 on CUDA cores, 16 / group on tensor cores."""
        ...

    def paged_attention(
        self, q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, work: DeviceWork, out: torch.Tensor
    ) -> None:
        """Write attention of the planned tokens: q and out [T, heads * head_dim]; other rows are left alone."""
        ...

    def rope_write_kv(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        table: tuple[torch.Tensor, torch.Tensor],
        kv: KVLayer,
        positions: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Rotate q into `out` and k into its slots, store v. Positions [T] i4, slots [T] i8, -1: write nothing.

        The table is cosines and sines, [max_positions, rotary_dim / 2] f32. Where the layer has scales,
        rows are quantized as `torch_kv_pool.quantize_rows` does, from the rotated f32 values.
        """
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        num_groups: int,
        out: torch.Tensor,
    ) -> None:
        """Write rms_norm(x) * weight. With `residual` [T, n] f32: add x to it, in place, and norm the sum."""
        ...

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        """Write act(x[:, :n]) * x[:, n:] for x [T, 2n]; `activation` is SILU or GELU_TANH."""
        ...

    def quantized_linear(self, x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
        """Write x @ weight.T + bias for x of at most 8 rows."""
        ...

    def sample(self, logits: torch.Tensor, draw: Draw) -> None:
        """Draw a token per row of logits [R, vocab] f32 by the rule of headrace.testing.numpy_sampling."""
        ...
