"""Grids, shared memory and arguments of every kernel in cuda/: implements headrace.backends.gpu.kernels.Kernels.

Nothing here knows whether the launcher is CuPy's or the test bed's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.backends.gpu.device import Device, Launcher
from headrace.backends.gpu.kernels import DeviceWork
from headrace.backends.gpu.kv_pool import KVLayer
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
MAX_HEADS = 8
"""Query heads of one block on CUDA cores: 8 rows of queries and sums are what its registers hold."""


class CudaKernels:
    """Launches the CUDA C++ kernels. Holds compiled kernels only."""

    def __init__(self, launcher: Launcher, device: Device) -> None:
        self._launcher = launcher
        self._device = device

    def tile_tokens(self, spec: AttentionSpec, kv: KVLayer, dtype: torch.dtype) -> int:
        return 1

    def paged_attention(
        self, q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, work: DeviceWork, out: torch.Tensor
    ) -> None:
        group = spec.num_heads // spec.num_kv_heads
        heads = heads_of_a_block(group)
        defines = attention_defines(spec, kv, q.dtype)
        attend = self._launcher.kernel("attention.cu", "attend_rows", defines)
        attend(
            (len(work.pieces), spec.num_kv_heads, -(-group // heads)),
            ATTENTION_THREADS,
            attention_shared_bytes(spec.head_dim, heads, kv.keys.dtype),
            (
                q, np.int64(q.stride(0)), kv.keys, kv.values, kv.key_scale, kv.value_scale, kv.bias,
                work.block_table, np.int32(work.block_table.shape[1]), work.pieces, work.counts,
                work.partial_rows, work.partial_sums, np.float32(spec.scale),
                np.float32(spec.softcap or 0.0),
            ),
        )  # fmt: skip
        merge = self._launcher.kernel("attention.cu", "merge_pieces", defines)
        merge(
            (len(work.merges), spec.num_heads, 1),
            -(-spec.head_dim // 32) * 32,
            0,
            (
                work.partial_rows, work.partial_sums, work.merges, work.counts, out,
                np.int64(out.stride(0)), np.int32(group * work.tile_tokens),
            ),
        )  # fmt: skip


def heads_of_a_block(group: int) -> int:
    """Return how many of a KV head's query heads one block takes, in parts as equal as can be."""
    return -(-group // -(-group // MAX_HEADS))


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
