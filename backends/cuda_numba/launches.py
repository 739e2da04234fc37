"""Grids and arguments of every kernel in kernels/: implements headrace.backends.gpu.kernels.Kernels.

Nothing here knows whether the launcher is the device's or the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.backends.cuda_numba.kernels.source import (
    BF16,
    F16,
    F32,
    FP8,
    INT8,
    VECTOR,
    power_of_two_at_least,
)
from headrace.backends.cuda_numba.sampling_launches import launch_sampling
from headrace.backends.gpu.device import Device, Launcher
from headrace.backends.gpu.kernels import (
    MAX_QUERY_ROWS,
    DeviceWork,
    Draw,
    QuantizedWeight,
)
from headrace.backends.torch_kv_pool import LARGEST, KVLayer
from headrace.interfaces import AttentionSpec

FORMATS = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float8_e4m3fn: FP8,
    torch.int8: INT8,
}
MAX_HEADS = 8
MAX_STATE = 64
"""Numbers of queries, and of sums, that a thread holds in registers; half of it before 8.9."""
TENSOR_WARPS, TILE = 4, 16
LOG2_E = 1.4426950408889634
ATTENTION_THREADS = 128
ROPE_WARPS, LINEAR_WARPS = 4, 4
GATE_THREADS, GATE_ELEMENTS = 128, 1024


class NumbaKernels:
    """Launches the Numba kernels. Holds compiled kernels and scratch memory only."""

    def __init__(self, launcher: Launcher, device: Device) -> None:
        self._launcher = launcher
        self._device = device
        self._native_fp8 = int(int(device.architecture.removeprefix("sm_")) >= 89)

    def tile_tokens(self, spec: AttentionSpec, kv: KVLayer, dtype: torch.dtype) -> int:
        group = spec.num_heads // spec.num_kv_heads
        is_tile = uses_tensor_cores(spec, kv.keys.dtype, dtype, self._native_fp8)
        return MAX_QUERY_ROWS // group if is_tile else 1

    def paged_attention(
        self, q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, work: DeviceWork, out: torch.Tensor
    ) -> None:
        group = spec.num_heads // spec.num_kv_heads
        defines = attention_defines(spec, kv, q.dtype, self._native_fp8)
        factor, cap = attention_factors(spec)
        arguments = (
            q, np.int64(q.stride(0)), kv.keys, kv.values, kv.key_scale, kv.value_scale, kv.bias,
            work.block_table, np.int32(work.block_table.shape[1]), work.pieces, work.counts,
            work.partial_rows, work.partial_sums, np.int32(spec.num_kv_heads), factor, cap,
        )  # fmt: skip
        if uses_tensor_cores(spec, kv.keys.dtype, q.dtype, self._native_fp8):
            rest = {key: value for key, value in defines.items() if key != "heads"}
            rest["tile_rows"] = group * work.tile_tokens
            attend = self._launcher.kernel("attention_tensor", "attention_tiles", rest)
            grid = (len(work.pieces), spec.num_kv_heads, 1)
            shared_bytes = tensor_shared_bytes(spec.head_dim, kv.keys.dtype)
            window = np.int32(spec.sliding_window or 0)
            attend(grid, ATTENTION_THREADS, shared_bytes, (*arguments, window))
        else:
            attend = self._launcher.kernel("attention", "attention_pieces", defines)
            grid = (len(work.pieces), spec.num_kv_heads, -(-group // int(defines["heads"])))
            attend(grid, ATTENTION_THREADS, 0, arguments)
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
        defines: Mapping[str, int | str] = {
            "head_dim": head_dim,
            "half": cosines.shape[1],
            "q": FORMATS[q.dtype],
            "k": FORMATS[k.dtype],
            "v": FORMATS[v.dtype],
            "out": FORMATS[out.dtype],
            "kv": FORMATS[kv.keys.dtype],
            "native_fp8": self._native_fp8,
        }
        rows = num_heads + 2 * num_kv_heads
        launch = self._launcher.kernel("elementwise", "rope_write_kv", defines)
        launch(
            (len(q), -(-rows // ROPE_WARPS), 1),
            32 * ROPE_WARPS,
            0,
            (
                q, np.int64(q.stride(0)), k, np.int64(k.stride(0)), v, np.int64(v.stride(0)),
                out, np.int64(out.stride(0)), cosines, sines, positions, slots, kv.keys, kv.values,
                kv.key_scale, kv.value_scale, np.int32(num_heads), np.int32(num_kv_heads),
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
        defines: Mapping[str, int | str] = {
            "act": FORMATS[x.dtype],
            "out": FORMATS[out.dtype],
            "adds": int(residual is not None),
            "warps": 1 if size <= 256 else 8,
        }
        launch = self._launcher.kernel("elementwise", "rms_norm", defines)
        launch(
            (len(x), num_groups, 1),
            32 * int(defines["warps"]),
            0,
            (
                x, np.int64(x.stride(0)), residual,
                np.int64(0 if residual is None else residual.stride(0)), weight, out,
                np.int64(out.stride(0)), np.int32(size), np.float32(eps),
            ),
        )  # fmt: skip

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        size = x.shape[1] // 2
        defines: Mapping[str, int | str] = {
            "act": FORMATS[x.dtype],
            "out": FORMATS[out.dtype],
            "activation": activation,
        }
        launch = self._launcher.kernel("elementwise", "gate", defines)
        launch(
            (len(x), -(-size // GATE_ELEMENTS), 1),
            GATE_THREADS,
            0,
            (x, np.int64(x.stride(0)), out, np.int64(out.stride(0)), np.int32(size)),
        )

    def quantized_linear(self, x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
        defines: Mapping[str, int | str] = {
            "rows": len(x),
            "act": FORMATS[x.dtype],
            "out": FORMATS[out.dtype],
            "four_bits": int(weight.minima is not None),
            "biased": int(weight.bias is not None),
        }
        launch = self._launcher.kernel("linear", "quantized_linear", defines)
        num_outputs = len(weight.codes)
        launch(
            (-(-num_outputs // LINEAR_WARPS), 1, 1),
            32 * LINEAR_WARPS,
            0,
            (
                x, np.int64(x.stride(0)), weight.codes, weight.scales, weight.minima, weight.bias, out,
                np.int64(out.stride(0)), np.int32(weight.in_size), np.int32(num_outputs),
            ),
        )  # fmt: skip

    def sample(self, logits: torch.Tensor, draw: Draw) -> None:
        launch_sampling(self._launcher, self._device.num_multiprocessors, logits, draw)


def uses_tensor_cores(
    spec: AttentionSpec, stored: torch.dtype, activation: torch.dtype, native_fp8: int
) -> bool:
    """Say whether tensor cores serve this group of query heads per KV head, up to 16.

    CUDA cores run out of issue slots before memory does above 4 heads, above 1 with 8-bit rows: computed
    from instructions per byte, to be confirmed on a device. Before 8.9 the compiler runs out of registers
    with wide heads and with 8-bit rows.
    """
    group = spec.num_heads // spec.num_kv_heads
    if activation == torch.float32 or group > MAX_QUERY_ROWS:
        return False
    if not native_fp8 and (stored in LARGEST or spec.head_dim > 128):
        return False
    if stored in LARGEST:
        return group > 1
    return stored == activation and group > 4


def tensor_shared_bytes(head_dim: int, stored: torch.dtype) -> int:
    """Return the dynamic shared memory of attention_tiles."""
    wide = TILE * (head_dim * 2 + 16)
    tiles = 4 * wide
    if stored in LARGEST:
        tiles = 4 * TILE * (head_dim + 16) + 2 * wide
    return TENSOR_WARPS * max(tiles, TILE * head_dim * 4)


def heads_of_a_block(group: int, head_dim: int, vector: int, max_state: int) -> int:
    """Return how many of a KV head's query heads one block takes, in parts as equal as can be.

    `vector`: elements in 16 bytes of stored keys.
    """
    vectors = head_dim // vector
    per_thread = vector * -(-vectors // min(32, power_of_two_at_least(vectors)))
    most = max(1, min(MAX_HEADS, max_state // per_thread))
    return -(-group // -(-group // most))


def attention_defines(
    spec: AttentionSpec, kv: KVLayer, activation: torch.dtype, native_fp8: int
) -> Mapping[str, int | str]:
    """Return what attention_pieces is specialised for."""
    group = spec.num_heads // spec.num_kv_heads
    vector = VECTOR[FORMATS[kv.keys.dtype]]
    max_state = MAX_STATE if native_fp8 else MAX_STATE // 2
    return {
        "head_dim": spec.head_dim,
        "group": group,
        "heads": heads_of_a_block(group, spec.head_dim, vector, max_state),
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
