"""Grids and arguments of every kernel in kernels/: implements headrace.backends.gpu.kernels.Kernels.

Nothing here knows whether the launcher is the device's or the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.backends.cuda_numba.kernels.source import BF16, F16, F32, FP8, INT8
from headrace.backends.gpu.device import Device, Launcher
from headrace.backends.gpu.kernels import DeviceWork
from headrace.backends.gpu.kv_pool import KVLayer
from headrace.interfaces import AttentionSpec

FORMATS = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float8_e4m3fn: FP8,
    torch.int8: INT8,
}
MAX_HEADS = 8
"""Query heads of one block: 8 queries and sums are what its registers hold."""
LOG2_E = 1.4426950408889634
ATTENTION_THREADS = 128


class NumbaKernels:
    """Launches the Numba kernels. Holds compiled kernels and scratch memory only."""

    def __init__(self, launcher: Launcher, device: Device) -> None:
        self._launcher = launcher
        self._device = device
        self._native_fp8 = int(int(device.architecture.removeprefix("sm_")) >= 89)

    def tile_tokens(self, spec: AttentionSpec, kv: KVLayer, dtype: torch.dtype) -> int:
        return 1

    def paged_attention(
        self, q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, work: DeviceWork, out: torch.Tensor
    ) -> None:
        group = spec.num_heads // spec.num_kv_heads
        heads = heads_of_a_block(group)
        defines = attention_defines(spec, kv, q.dtype, self._native_fp8)
        factor, cap = attention_factors(spec)
        attend = self._launcher.kernel("attention", "attention_pieces", defines)
        attend(
            (len(work.pieces), spec.num_kv_heads, -(-group // heads)),
            ATTENTION_THREADS,
            0,
            (
                q, np.int64(q.stride(0)), kv.keys, kv.values, kv.key_scale, kv.value_scale, kv.bias,
                work.block_table, np.int32(work.block_table.shape[1]), work.pieces, work.counts,
                work.partial_rows, work.partial_sums, np.int32(spec.num_kv_heads), factor, cap,
            ),
        )  # fmt: skip
        merge_defines: Mapping[str, int | str] = {
            "head_dim": spec.head_dim,
            "group": group,
            "act": FORMATS[out.dtype],
            "tile_rows": group * work.tile_tokens,
        }
        merge = self._launcher.kernel("attention", "attention_merge", merge_defines)
        merge(
            (len(work.merges), spec.num_kv_heads, 1),
            ATTENTION_THREADS,
            0,
            (
                work.merges, work.counts, work.partial_rows, work.partial_sums, out,
                np.int64(out.stride(0)), np.int32(spec.num_kv_heads),
            ),
        )  # fmt: skip


def heads_of_a_block(group: int) -> int:
    """Return how many of a KV head's query heads one block takes, in parts as equal as can be."""
    return -(-group // -(-group // MAX_HEADS))


def attention_defines(
    spec: AttentionSpec, kv: KVLayer, activation: torch.dtype, native_fp8: int
) -> Mapping[str, int | str]:
    """Return what attention_pieces is specialised for."""
    group = spec.num_heads // spec.num_kv_heads
    return {
        "head_dim": spec.head_dim,
        "group": group,
        "heads": heads_of_a_block(group),
        "kv": FORMATS[kv.keys.dtype],
        "act": FORMATS[activation],
        "block_size": kv.keys.shape[1],
        "scaled": int(kv.key_scale is not None),
        "biased": int(kv.bias is not None),
        "capped": int(spec.softcap is not None),
        "native_fp8": native_fp8,
    }


def attention_factors(spec: AttentionSpec) -> tuple[np.float32, np.float32]:
    """Return what queries are multiplied by, and the cap, so that scores come out in base 2."""
    if spec.softcap is None:
        return np.float32(spec.scale * LOG2_E), np.float32(0.0)
    return np.float32(spec.scale / spec.softcap), np.float32(spec.softcap * LOG2_E)
