"""Grids, shared memory and arguments of the kernels in cuda/. Implements headrace.backends.gpu.kernels.Kernels.

Nothing here knows whether the launcher is CuPy's or the test bed's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.backends.cupy_raw.sampling_launches import launch_sampling
from headrace.backends.gpu.device import Device, Launcher
from headrace.backends.gpu.kernels import (
    GELU_TANH,
    MAX_QUERY_ROWS,
    DeviceWork,
    Draw,
    QuantizedWeight,
)
from headrace.backends.torch_kv_pool import KVLayer
from headrace.interfaces import AttentionSpec

FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.int8: 4,
}
"""The formats of primitives.cuh."""
ATTENTION_THREADS = 128
ATTENTION_STAGES = 4
ROW_THREADS = 256
LINEAR_THREADS = 128
MAX_HEADS = 4
"""Query heads of one block on CUDA cores: with 8, ptxas spills registers on sm_80."""


class CudaKernels:
    """Launches the CUDA C++ kernels. Holds compiled kernels only."""

    def __init__(self, launcher: Launcher, device: Device) -> None:
        self._launcher = launcher
        self._device = device

    def tile_tokens(self, spec: AttentionSpec, kv: KVLayer, dtype: torch.dtype) -> int:
        group = spec.num_heads // spec.num_kv_heads
        return MAX_QUERY_ROWS // group if uses_tensor_cores(group, kv.keys.dtype, dtype) else 1

    def paged_attention(
        self, q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, work: DeviceWork, out: torch.Tensor
    ) -> None:
        group = spec.num_heads // spec.num_kv_heads
        heads = heads_of_a_block(group)
        tile_rows = np.int32(group * work.tile_tokens)
        defines = attention_defines(spec, kv, q.dtype)
        arguments = (
            q, np.int64(q.stride(0)), kv.keys, kv.values, kv.key_scale, kv.value_scale, kv.bias,
            work.block_table, np.int32(work.block_table.shape[1]), work.pieces, work.counts,
            work.partial_rows, work.partial_sums, np.float32(spec.scale),
            np.float32(spec.softcap or 0.0),
        )  # fmt: skip
        if uses_tensor_cores(group, kv.keys.dtype, q.dtype):
            self._launcher.kernel("attention_tensor.cu", "attend_tiles", defines)(
                (len(work.pieces), spec.num_kv_heads, 1),
                ATTENTION_THREADS,
                tensor_shared_bytes(spec.head_dim, kv.keys.dtype),
                (*arguments, tile_rows, np.int32(spec.sliding_window or 0)),
            )
        else:
            self._launcher.kernel("attention.cu", "attend_rows", defines)(
                (len(work.pieces), spec.num_kv_heads, -(-group // heads)),
                ATTENTION_THREADS,
                attention_shared_bytes(spec.head_dim, heads, kv.keys.dtype),
                arguments,
            )
        merge = self._launcher.kernel("attention.cu", "merge_pieces", defines)
        merge(
            (len(work.merges), spec.num_heads, 1),
            -(-spec.head_dim // 32) * 32,
            0,
            (
                work.partial_rows, work.partial_sums, work.merges, work.counts, out,
                np.int64(out.stride(0)), tile_rows,
            ),
        )  # fmt: skip

    def rope_write_kv(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        table: tuple[torch.Tensor, torch.Tensor],
        kv: KVLayer,
        positions: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        q, k, v = qkv
        cosines, sines = table
        num_kv_heads, head_dim = kv.keys.shape[2:]
        num_heads = q.shape[1] // head_dim
        defines = {
            "IN": FORMATS[q.dtype],
            "VALUE": FORMATS[v.dtype],
            "OUT": FORMATS[out.dtype],
            "STORED": FORMATS[kv.keys.dtype],
        }
        self._launcher.kernel("rows.cu", "rope_write_kv", defines)(
            (len(q), -(-(num_heads + 2 * num_kv_heads) // (ROW_THREADS // 32)), 1),
            ROW_THREADS,
            0,
            (
                q, np.int64(q.stride(0)), k, np.int64(k.stride(0)), v, np.int64(v.stride(0)),
                cosines, sines, positions, slots, kv.keys, kv.values, kv.key_scale, kv.value_scale,
                out, np.int64(out.stride(0)), np.int32(num_heads), np.int32(num_kv_heads),
                np.int32(head_dim), np.int32(cosines.shape[1]),
            ),
        )  # fmt: skip

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        num_groups: int,
        out: torch.Tensor,
    ) -> None:
        size = x.shape[1] // num_groups
        rows = (x, out, weight[None]) if residual is None else (x, out, weight[None], residual)
        vector = vector_size(size, *rows)
        defines = {
            "IN": FORMATS[x.dtype],
            "OUT": FORMATS[out.dtype],
            "VECTOR": vector,
            "RESIDUAL": int(residual is not None),
        }
        threads = min(ROW_THREADS, -(-size // (32 * vector)) * 32)
        self._launcher.kernel("rows.cu", "rms_norm", defines)(
            (len(x), num_groups, 1),
            threads,
            threads // 32 * 4,
            (
                x, np.int64(x.stride(0)), residual,
                np.int64(0 if residual is None else residual.stride(0)), weight, out,
                np.int64(out.stride(0)), np.int32(size), np.float32(eps),
            ),
        )  # fmt: skip

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        size = out.shape[1]
        vector = vector_size(size, x, out)
        defines = {
            "IN": FORMATS[x.dtype],
            "OUT": FORMATS[out.dtype],
            "VECTOR": vector,
            "GELU": int(activation == GELU_TANH),
        }
        self._launcher.kernel("rows.cu", "gate_mul", defines)(
            (len(x), -(-size // (ROW_THREADS * vector)), 1),
            ROW_THREADS,
            0,
            (x, np.int64(x.stride(0)), out, np.int64(out.stride(0)), np.int32(size)),
        )

    def quantized_linear(self, x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
        defines = {
            "IN": FORMATS[x.dtype],
            "OUT": FORMATS[out.dtype],
            "BITS": 8 if weight.minima is None else 4,
            "TOKENS": 1 << (len(x) - 1).bit_length(),
        }
        self._launcher.kernel("linear.cu", "multiply", defines)(
            (-(-out.shape[1] // (LINEAR_THREADS // 32)), 1, 1),
            LINEAR_THREADS,
            0,
            (
                x, np.int64(x.stride(0)), weight.codes, weight.scales, weight.minima, weight.bias,
                out, np.int64(out.stride(0)), np.int32(len(x)), np.int32(weight.in_size),
                np.int32(out.shape[1]),
            ),
        )  # fmt: skip

    def sample(self, logits: torch.Tensor, draw: Draw) -> None:
        launch_sampling(self._launcher, self._device.num_multiprocessors, logits, draw)


def vector_size(size: int, *rows: torch.Tensor) -> int:
    """Return 8 where every row of `size` elements can be read 16 bytes at a time, else 1."""
    aligned = all(
        row.data_ptr() % 16 == 0 and (len(row) == 1 or row.stride(0) * row.itemsize % 16 == 0)
        for row in rows
    )
    return 8 if aligned and size % 8 == 0 else 1


def heads_of_a_block(group: int) -> int:
    """Return how many of a KV head's query heads one block takes, in parts as equal as can be."""
    return -(-group // -(-group // MAX_HEADS))


def uses_tensor_cores(group: int, stored: torch.dtype, activation: torch.dtype) -> bool:
    """Say which kernel attends. CUDA cores keep up with memory to a group of 4, with 8-bit rows to 1.

    Computed from issue slots per byte, not measured: docs/kernels.md says what a device must show.
    """
    if activation == torch.float32 or group > MAX_QUERY_ROWS:
        return False
    return group > 1 if stored.itemsize == 1 else group > 4 and stored == activation


def tensor_shared_bytes(head_dim: int, stored: torch.dtype) -> int:
    """Return what attend_tiles wants: four warps' stages and the queries, or the merge if that is larger."""
    wide = 16 * (head_dim * 2 + 16)
    stage = 2 * 16 * (head_dim * stored.itemsize + 16) + 3 * 16 * 4
    warp = 2 * stage + (2 * wide if stored.itemsize == 1 else 0)
    return max(4 * warp + wide, 4 * 16 * (head_dim + 2) * 4)


def attention_defines(
    spec: AttentionSpec, kv: KVLayer, activation: torch.dtype
) -> Mapping[str, int | str]:
    """Return what specialises attention.cu."""
    group = spec.num_heads // spec.num_kv_heads
    return {
        "HEAD_DIM": spec.head_dim,
        "GROUP": group,
        "HEADS": heads_of_a_block(group),
        "BLOCK_SIZE": kv.keys.shape[1],
        "ACTIVATION": FORMATS[activation],
        "STORED": FORMATS[kv.keys.dtype],
        "SOFTCAP": int(spec.softcap is not None),
        "BIAS": int(kv.bias is not None),
    }


def attention_shared_bytes(head_dim: int, heads: int, stored: torch.dtype) -> int:
    """Return what attend_rows wants: its stages, or the merge that takes their place if that is larger."""
    vectors = head_dim * stored.itemsize // 16
    lanes = min(32, 1 << (vectors - 1).bit_length())
    stages = ATTENTION_STAGES * 2 * -(-vectors // lanes) * ATTENTION_THREADS * 16
    merge = ATTENTION_THREADS // 32 * heads * (head_dim + 2) * 4
    return max(stages, merge)
