"""The specialisations of CUDA C++ kernels whose machine code is judged, and faults that tests must notice."""

from __future__ import annotations

from collections.abc import Mapping

F32, BF16, F16, FP8, INT8 = range(5)
ARCHITECTURES = ("sm_80", "sm_90")


def _attention(
    head_dim: int,
    group: int,
    stored: int,
    *,
    activation: int = BF16,
    softcap: int = 0,
    bias: int = 0,
) -> tuple[str, Mapping[str, int | str]]:
    from headrace.backends.cupy_raw.launches import heads_of_a_block

    defines = {
        "HEAD_DIM": head_dim, "GROUP": group, "HEADS": heads_of_a_block(group), "BLOCK_SIZE": 16,
        "ACTIVATION": activation, "STORED": stored, "SOFTCAP": softcap, "BIAS": bias,
    }  # fmt: skip
    return "attention.cu", defines


BUILDS: Mapping[str, tuple[str, Mapping[str, int | str]]] = {
    "attention d64 g1 bf16": _attention(64, 1, BF16),
    "attention d128 g1 bf16": _attention(128, 1, BF16),
    "attention d128 g4 bf16": _attention(128, 4, BF16),
    "attention d128 g8 bf16": _attention(128, 8, BF16),
    "attention d128 g4 fp8": _attention(128, 4, FP8),
    "attention d128 g4 int8": _attention(128, 4, INT8),
    "attention d80 g3 bf16": _attention(80, 3, BF16),
    "attention d96 g2 f16 bias": _attention(96, 2, F16, activation=F16, bias=1),
    "attention d256 g2 bf16 softcap": _attention(256, 2, BF16, softcap=1),
    "tiles d128 g8 bf16": ("attention_tensor.cu", _attention(128, 8, BF16)[1]),
    "tiles d128 g4 fp8": ("attention_tensor.cu", _attention(128, 4, FP8)[1]),
    "tiles d256 g8 bf16 softcap": ("attention_tensor.cu", _attention(256, 8, BF16, softcap=1)[1]),
    "tiles d64 g8 f16 bias": (
        "attention_tensor.cu",
        _attention(64, 8, F16, activation=F16, bias=1)[1],
    ),
    "rows add bf16": ("rows.cu", {"IN": BF16, "OUT": BF16, "VECTOR": 8, "RESIDUAL": 1}),
    "rows f32 to bf16, gelu": ("rows.cu", {"IN": F32, "OUT": BF16, "VECTOR": 8, "GELU": 1}),
    "rows fp8": ("rows.cu", {"IN": BF16, "VALUE": BF16, "OUT": BF16, "STORED": FP8}),
    "linear int4, 1 token": ("linear.cu", {"IN": BF16, "OUT": BF16, "BITS": 4, "TOKENS": 1}),
    "linear int8, 8 tokens": ("linear.cu", {"IN": BF16, "OUT": BF16, "BITS": 8, "TOKENS": 8}),
    "sampling": ("sampling.cu", {"VECTOR": 4}),
}

MUTANTS: Mapping[tuple[str, str], str] = {
    ("BUG_SHORT_WAIT", "split over pieces"): "none",
    ("BUG_NO_BARRIER_BEFORE_MERGE", "group of 4, an empty sequence"): "thread",
    ("BUG_NO_BARRIER_IN_MERGE", "split over pieces"): "none",
    ("BUG_SHORT_WAIT", "hidden rows, group of 8"): "none",
    ("BUG_NO_SYNC_AFTER_COPY", "tiles: few"): "thread",
    ("BUG_NO_SYNC_BEFORE_REUSE", "tiles: few"): "thread",
    ("BUG_NO_BARRIER_AFTER_QUERY", "tiles: few"): "thread",
    ("BUG_NO_BARRIER_IN_MERGE", "tiles: few"): "thread",
    ("BUG_NO_BARRIER_IN_SUM", "norm"): "none",
    ("BUG_NO_BARRIER_BEFORE_BIAS", "draw_small"): "thread",
    ("BUG_NO_BARRIER_BEFORE_PENALTIES", "draw_small"): "thread",
    ("BUG_NO_BARRIER_IN_STATISTICS", "draw_filters"): "none",
    ("BUG_NO_BARRIER_IN_SCAN", "draw_filters"): "none",
    ("BUG_NO_BARRIER_BEFORE_COUNTS", "draw_filters"): "none",
    ("BUG_NO_BARRIER_AFTER_COUNTS", "draw_filters"): "none",
    ("BUG_NO_BARRIER_IN_DRAW", "draw_filters"): "none",
    ("BUG_NO_BOUND", "silu, odd size"): "address,undefined",
    ("BUG_NO_BOUND", "linear int4"): "address,undefined",
    ("BUG_NO_BOUND", "rope"): "address,undefined",
    ("BUG_NO_BOUND", "decode"): "address,undefined",
    ("BUG_NO_REDUCTION", "linear int8"): "none",
}
"""(Define that removes a barrier, wait, bound or reduction; check that fails then) -> under which sanitizer."""

SANITIZED = (
    "decode", "tiles: fp8, window", "rope, int8", "norm", "add and norm", "silu", "linear int4",
    "draw_small",
)  # fmt: skip
"""Checks that reach every kernel, run under each sanitizer."""
