"""Attention of long runs of queries, through torch: its fused kernels beat what we would write for products this large.

Rows are gathered from the pool first. That copies a sequence's keys and values once per chunk and layer, and takes
any storage type, window, bias and soft cap.
"""

from __future__ import annotations

import torch

from headrace.backends.gpu.kv_pool import KVLayer, gather_rows
from headrace.backends.gpu.step import LongSequence
from headrace.interfaces import AttentionSpec


def attend_long(
    q: torch.Tensor, kv: KVLayer, spec: AttentionSpec, sequence: LongSequence, out: torch.Tensor
) -> None:
    """Write the rows of `out` [T, heads * head_dim] that belong to `sequence`."""
    queries = q[sequence.first : sequence.last].unflatten(1, (spec.num_heads, spec.head_dim))
    keys = gather_rows(kv.keys, kv.key_scale, sequence.slots).to(q.dtype)
    values = gather_rows(kv.values, kv.value_scale, sequence.slots).to(q.dtype)
    bias = None if kv.bias is None else kv.bias.flatten(0, 1)[sequence.slots]
    attended = _attend(
        queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), bias, spec
    )
    out[sequence.first : sequence.last] = attended.transpose(0, 1).flatten(1)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """queries [heads, n, d], keys and values [kv heads, rows, d], bias [rows, kv heads] -> [heads, n, d]."""
    group = spec.num_heads // spec.num_kv_heads
    seen = _visible(queries.shape[1], keys.shape[1], spec.sliding_window, queries.device)
    if spec.softcap is None and bias is None:
        attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=seen, scale=spec.scale,
            enable_gqa=group > 1,
        )  # fmt: skip
        return attended[0]
    scores = queries.unflatten(0, (-1, group)).float() @ keys[:, None].transpose(2, 3).float()
    scores = scores * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + bias.T[:, None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == -torch.inf, 0, largest))
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1, total)  # a query that sees nothing gives zeros
    return (weights @ values[:, None].float()).flatten(0, 1).to(queries.dtype)


def _visible(
    num_queries: int, kv_len: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which rows each query sees, [num_queries, kv_len]: causal, and within the window."""
    last = torch.arange(kv_len - num_queries, kv_len, device=device)[:, None]
    rows = torch.arange(kv_len, device=device)[None, :]
    seen = rows <= last
    return seen if window is None else seen & (rows > last - window)
