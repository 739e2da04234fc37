"""Attention of long runs of queries, through torch: its fused kernels beat what we would write for them.

torch's variable-length attention reads the pool through the block table, where the installed torch takes our
page size. Else rows are gathered first: one copy of a sequence's keys and values per chunk and layer, for any
storage type, window, bias and soft cap.
"""

from __future__ import annotations

import structlog
import torch

from headrace.backends.gpu.step import LongSequence
from headrace.backends.torch_kv_pool import KVLayer, gather_rows
from headrace.interfaces import AttentionSpec


class LongAttention:
    """Attends to long sequences. Mutable: remembers whether torch reads the pool itself."""

    def __init__(self) -> None:
        self._reads_pool: bool | None = None

    def attend(
        self,
        q: torch.Tensor,
        kv: KVLayer,
        spec: AttentionSpec,
        sequence: LongSequence,
        out: torch.Tensor,
    ) -> None:
        """Write the rows of `out` [T, heads * head_dim] that belong to `sequence`."""
        queries = q[sequence.first : sequence.last].view(-1, spec.num_heads, spec.head_dim)
        attended = self._through_pool(queries, kv, spec, sequence)
        if attended is None:
            attended = attend_gathered(queries, kv, spec, sequence)
        out[sequence.first : sequence.last] = attended.flatten(1)

    def _through_pool(
        self, queries: torch.Tensor, kv: KVLayer, spec: AttentionSpec, sequence: LongSequence
    ) -> torch.Tensor | None:
        """Return None where torch does not take this layer, or has refused the pool once."""
        plain = kv.bias is None and spec.softcap is None and queries.dtype == kv.keys.dtype
        if self._reads_pool is False or not queries.is_cuda or not plain:
            return None
        try:
            attended = _varlen(queries, kv, spec, sequence)
        except (ImportError, TypeError, RuntimeError, NotImplementedError) as error:
            self._reads_pool = False
            structlog.get_logger(__name__).info(
                "prefill gathers rows: torch's attention does not read the pool",
                reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            return None
        self._reads_pool = True
        return attended


def _varlen(
    queries: torch.Tensor, kv: KVLayer, spec: AttentionSpec, sequence: LongSequence
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    num_queries, num_rows = len(queries), len(sequence.slots)
    window = -1 if spec.sliding_window is None else spec.sliding_window - 1
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=queries.device)
    attended = varlen_attn(
        queries, kv.keys, kv.values, starts, None, num_queries, num_rows,
        scale=spec.scale, window_size=(window, 0), enable_gqa=spec.num_heads != spec.num_kv_heads,
        seqused_k=torch.tensor([num_rows], dtype=torch.int32, device=queries.device),
        block_table=sequence.block_table,
    )  # fmt: skip
    assert isinstance(attended, torch.Tensor), "no log-sum-exp is asked for"
    return attended


def attend_gathered(
    queries: torch.Tensor, kv: KVLayer, spec: AttentionSpec, sequence: LongSequence
) -> torch.Tensor:
    """Return attention [n, heads, head_dim] over a gathered copy of the sequence's rows."""
    keys = gather_rows(kv.keys, kv.key_scale, sequence.slots).to(queries.dtype)
    values = gather_rows(kv.values, kv.value_scale, sequence.slots).to(queries.dtype)
    bias = None if kv.bias is None else kv.bias.flatten(0, 1)[sequence.slots]
    return _attend(
        queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), bias, spec
    ).transpose(0, 1)


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
    scores = (
        queries.reshape(-1, group, *queries.shape[1:]).float()
        @ keys[:, None].transpose(2, 3).float()
    )
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
