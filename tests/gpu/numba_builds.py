"""The specialisations of Numba kernels whose machine code is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.interfaces import AttentionSpec

ARCHITECTURES = ("sm_80", "sm_90")
Build = tuple[str, str, Mapping[str, int | str]]
STORED = {
    "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


def _attention(head_dim: int, group: int, stored: str, **changed: Any) -> Build:
    return "attention", "attention_pieces", {
        "head_dim": head_dim, "group": group, "kv": stored, "act": "bf16", "softcap": 0, "bias": 0, **changed,
    }  # fmt: skip


def _tiles(head_dim: int, group: int, stored: str, **changed: Any) -> Build:
    source, _, defines = _attention(head_dim, group, stored, **changed)
    return "attention_tensor", "attention_tiles", defines


def _rope(stored: str) -> Build:
    defines = dict.fromkeys(("q", "k", "v", "out"), "bf16")
    return "elementwise", "rope_write_kv", {
        **defines, "head_dim": 128, "half": 64, "kv": stored, "native_fp8": -1,
    }  # fmt: skip


def _linear(four_bits: int, rows: int) -> Build:
    return "linear", "quantized_linear", {
        "rows": rows, "act": "bf16", "out": "bf16", "four_bits": four_bits, "biased": 1,
    }  # fmt: skip


BUILDS: Mapping[str, Build] = {
    "attention d64 g1 bf16": _attention(64, 1, "bf16"),
    "attention d128 g1 bf16": _attention(128, 1, "bf16"),
    "attention d128 g4 bf16": _attention(128, 4, "bf16"),
    "attention d128 g1 fp8": _attention(128, 1, "fp8"),
    "attention d128 g1 int8": _attention(128, 1, "int8"),
    "attention d96 g2 f16 bias": _attention(96, 2, "f16", act="f16", bias=1),
    "attention d256 g2 bf16 softcap": _attention(256, 2, "bf16", softcap=1),
    "tiles d128 g8 bf16": _tiles(128, 8, "bf16"),
    "tiles d128 g4 fp8": _tiles(128, 4, "fp8"),
    "tiles d128 g4 int8": _tiles(128, 4, "int8"),
    "tiles d256 g8 bf16": _tiles(256, 8, "bf16"),
    "merge d128 g4": (
        "attention", "attention_merge", {"head_dim": 128, "group": 4, "act": "bf16", "tile_rows": 4},
    ),
    "add and norm": (
        "elementwise", "rms_norm", {"act": "bf16", "out": "bf16", "adds": 1, "warps": 8},
    ),
    "gelu": ("elementwise", "gate", {"act": "f32", "out": "bf16", "activation": 1}),
    "rope bf16": _rope("bf16"),
    "rope fp8": _rope("fp8"),
    "linear int8, 1 token": _linear(0, 1),
    "linear int8, 8 tokens": _linear(0, 8),
    "linear int4, 1 token": _linear(1, 1),
    "cut": ("sampling", "cut_rows", {"vector": 4}),
    "draw": ("sampling", "draw_shares", {"vector": 4}),
    "statistics": ("sampling", "row_statistics", {"vector": 4}),
}  # fmt: skip


def defines_for(build: Build, architecture: str) -> Mapping[str, int | str] | None:
    """Return what launches.py would specialise the kernel for on this architecture; None: it would not."""
    from headrace.backends.cuda_numba.launches import attention_defines, uses_tensor_cores
    from headrace.backends.torch_kv_pool import LARGEST, KVLayer

    source, name, defines = build
    native = int(architecture != "sm_80")
    if name not in ("attention_pieces", "attention_tiles"):
        return {key: native if value == -1 else value for key, value in defines.items()}
    stored, act = STORED[str(defines["kv"])], STORED[str(defines["act"])]
    group, head_dim = int(defines["group"]), int(defines["head_dim"])
    rows = torch.zeros(1, 16, 1, head_dim, dtype=stored)
    scale = torch.zeros(1, 16, 1) if stored in LARGEST else None
    bias = torch.zeros(1, 16, 1) if defines["bias"] else None
    kv = KVLayer(rows, rows, 0, scale, scale, bias)
    softcap = 30.0 if defines["softcap"] else None
    spec = AttentionSpec(group, 1, head_dim, 1.0, None, softcap)
    if uses_tensor_cores(spec, stored, act, native) != (name == "attention_tiles"):
        return None
    chosen = dict(attention_defines(spec, kv, act, native))
    if name == "attention_tiles":
        del chosen["heads"]
        chosen["tile_rows"] = 16 // group * group
    return chosen
