"""The attention cases that every GPU kernel is held against, and the float64 oracle's answer to each.

Blocks of the pool are handed out in random order; what no sequence may read is NaN, and unused table entries
name blocks that do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.gpu.kernels import DeviceWork, Kernels
from headrace.backends.gpu.work_list import plan_attention
from headrace.backends.torch_kv_pool import LARGEST, KVLayer, gather_rows, quantize_rows
from headrace.interfaces import AttentionSpec
from headrace.testing.numpy_ops import attend

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 16
UNUSED_ENTRY = -7_777_777
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
TOLERANCE = {BF16: 6e-3, F16: 1.5e-3, F32: 2e-5}
"""Norm of the error over the norm of the answer: the output's rounding, and for tensor cores the weights'."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One problem: `sequences` are (query tokens, KV rows)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    group: int = 1
    num_kv_heads: int = 2
    activation: torch.dtype = BF16
    stored: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    bias: str = ""
    """"": none; "random": numbers; "hidden": -inf on many rows, on all rows of sequence 0 for KV head 0."""
    blocks_wanted: int = 6
    query_scale: float = 1.0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.group * self.num_kv_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.window,
            self.softcap,
        )


C = AttentionCase
ATTENTION_CASES = (
    C("decode", ((1, 40), (1, 37), (1, 1))),
    C("split over pieces", ((1, 300), (1, 17), (1, 1)), head_dim=128, blocks_wanted=9),
    C("group of 4, an empty sequence", ((0, 5), (1, 129), (1, 64)), head_dim=128, group=4),
    C("short appends", ((3, 70), (1, 20), (4, 4)), head_dim=128, group=4),
    C("float16", ((1, 33), (2, 90)), head_dim=64, group=2, activation=F16, stored=F16),
    C("float32", ((1, 100), (2, 9)), head_dim=64, group=2, activation=F32, stored=F32),
    C("head_dim 80, group of 3", ((1, 90), (1, 7)), head_dim=80, group=3),
    C("head_dim 96, bias", ((1, 90), (2, 50)), head_dim=96, group=2, bias="random"),
    C("head_dim 256, soft cap", ((1, 70), (1, 31)), head_dim=256, group=2, softcap=20.0),
    C("fp8", ((1, 100), (2, 31)), head_dim=128, group=4, stored=FP8),
    C("int8", ((1, 100), (1, 31)), head_dim=64, group=2, stored=INT8),
    C("window", ((1, 200), (3, 100), (1, 5)), window=33, group=2),
    C("window, soft cap, hidden rows", ((1, 120), (4, 60)), window=40, softcap=5.0, bias="hidden"),
    C("hidden rows, group of 8", ((2, 60), (1, 200)), head_dim=128, group=8, bias="hidden"),
    C("one query head of many", ((1, 50), (1, 80)), group=12, num_kv_heads=1),
    C("tiles: few", ((1, 140),), group=8, num_kv_heads=1, blocks_wanted=1),
    C("tiles: group of 8, soft cap", ((1, 90), (2, 33), (1, 1)), group=8, softcap=9.0),
    C(
        "tiles: window, hidden rows",
        ((2, 120), (1, 40)),
        head_dim=80,
        group=6,
        window=30,
        bias="hidden",
    ),
    C(
        "tiles: head_dim 256, float16",
        ((1, 150),),
        head_dim=256,
        group=7,
        activation=F16,
        stored=F16,
    ),
    C("tiles: fp8, window", ((3, 130), (1, 9)), group=2, stored=FP8, window=50, bias="random"),
    C("large scores", ((1, 100), (2, 40)), group=4, query_scale=1e4),
)


@dataclass(slots=True)
class AttentionProblem:
    """A case made of numbers, on the device, with the float64 answer."""

    case: AttentionCase
    q: torch.Tensor
    kv: KVLayer
    query_starts: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    expected: NDArray[np.float64]

    def work(self, tile_tokens: int, num_extra: int = 3) -> DeviceWork:
        """Plan it; the work list has room for `num_extra` tokens more, as under a captured graph."""
        spec = self.case.spec
        num_tokens = int(self.query_starts[-1])
        planned = plan_attention(
            self.query_starts, self.kv_lens, np.ones(len(self.kv_lens), np.bool_),
            window=spec.sliding_window, tile_tokens=tile_tokens,
            blocks_wanted=self.case.blocks_wanted, max_tokens=num_tokens + num_extra,
        )  # fmt: skip
        device = self.q.device
        rows = len(planned.pieces) * spec.num_kv_heads * self.case.group * tile_tokens
        pieces, merges = planned.pieces.copy(), planned.merges.copy()
        pieces[planned.counts[0] :] = UNUSED_ENTRY
        merges[planned.counts[1] :] = UNUSED_ENTRY
        return DeviceWork(
            pieces=torch.tensor(pieces, device=device),
            merges=torch.tensor(merges, device=device),
            counts=torch.tensor(planned.counts, device=device),
            block_table=torch.tensor(self.block_tables, device=device),
            partial_rows=torch.full((rows, spec.head_dim), np.nan, device=device),
            partial_sums=torch.full((rows, 2), np.nan, device=device),
            tile_tokens=tile_tokens,
        )

    def error(self, out: torch.Tensor) -> float:
        """Return the relative error of `out`; NaN and infinities count as infinite."""
        got = out.cpu().double().numpy()
        difference = np.linalg.norm(got - self.expected)
        size = max(float(np.linalg.norm(self.expected)), 1e-30)
        return float(difference / size) if np.isfinite(difference) else np.inf

    def answer(self, kernels: Kernels) -> torch.Tensor:
        """Return what the kernels compute, as they would have it planned; NaN where they wrote nothing."""
        out = torch.full_like(self.q, np.nan)
        work = self.work(kernels.tile_tokens(self.case.spec, self.kv, self.case.activation))
        kernels.paged_attention(self.q, self.kv, self.case.spec, work, out)
        return out


def attention_problem(case: AttentionCase, seed: int = 0, device: str = "cpu") -> AttentionProblem:
    """Make a case's numbers. The same seed gives the same problem."""
    random = np.random.default_rng(seed)
    torch_random = torch.Generator().manual_seed(seed)
    spec = case.spec
    lens = np.array([rows for _, rows in case.sequences], np.int32)
    counts = -(-lens // BLOCK_SIZE)
    num_blocks = int(counts.sum()) + 3
    ids = random.permutation(num_blocks)
    tables = np.full((len(lens), int(counts.max()) + 2), UNUSED_ENTRY, np.int32)
    starts = np.cumsum([0, *counts])
    for table, first, count in zip(tables, starts, counts, strict=False):
        table[:count] = ids[first : first + count]
    slots = [
        table[np.arange(length) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + np.arange(length) % BLOCK_SIZE
        for table, length in zip(tables, lens, strict=True)
    ]  # fmt: skip
    kv = _kv_layer(case, num_blocks, np.concatenate(slots), slots, torch_random)
    query_starts = np.cumsum([0, *(n for n, _ in case.sequences)]).astype(np.int32)
    q = torch.randn(int(query_starts[-1]), spec.num_heads * spec.head_dim, generator=torch_random)
    q = (q * case.query_scale).to(case.activation)
    expected = _expected(case, q, kv, query_starts, slots)
    for name in ("keys", "values", "key_scale", "value_scale", "bias"):
        plane = getattr(kv, name)
        setattr(kv, name, None if plane is None else plane.to(device))
    return AttentionProblem(case, q.to(device), kv, query_starts, lens, tables, expected)


def _kv_layer(
    case: AttentionCase,
    num_blocks: int,
    used: NDArray[np.int64],
    slots: list[NDArray[np.int64]],
    random: torch.Generator,
) -> KVLayer:
    rows = (num_blocks * BLOCK_SIZE, case.num_kv_heads)
    planes, scales = [], []
    for _ in range(2):
        numbers = torch.randn(*rows, case.head_dim, generator=random)
        scale = None
        if case.stored in LARGEST:
            numbers, scale = quantize_rows(numbers, case.stored)
            unread = torch.full_like(scale, torch.nan)
            unread[used] = scale[used]
            scale = unread.view(num_blocks, BLOCK_SIZE, -1)
        else:
            unread = torch.full_like(numbers, torch.nan)
            unread[used] = numbers[used]
            numbers = unread.to(case.stored)
        planes.append(numbers.view(num_blocks, BLOCK_SIZE, case.num_kv_heads, case.head_dim))
        scales.append(scale)
    bias = None
    if case.bias:
        numbers = torch.full(rows, torch.nan)
        numbers[used] = torch.randn(len(used), case.num_kv_heads, generator=random)
        if case.bias == "hidden":
            numbers[used[::3]] = -torch.inf
            numbers[slots[0], 0] = -torch.inf
        bias = numbers.view(num_blocks, BLOCK_SIZE, case.num_kv_heads)
    return KVLayer(planes[0], planes[1], 0, scales[0], scales[1], bias)


def _expected(
    case: AttentionCase,
    q: torch.Tensor,
    kv: KVLayer,
    query_starts: NDArray[np.int32],
    slots: list[NDArray[np.int64]],
) -> NDArray[np.float64]:
    spec = case.spec
    numbers = q.double().numpy().reshape(len(q), spec.num_heads, spec.head_dim)
    out = np.zeros(numbers.shape)
    for index, (first, last) in enumerate(zip(query_starts, query_starts[1:], strict=False)):
        chosen = torch.tensor(slots[index])
        keys = gather_rows(kv.keys, kv.key_scale, chosen).double().numpy()
        values = gather_rows(kv.values, kv.value_scale, chosen).double().numpy()
        bias = None if kv.bias is None else kv.bias.flatten(0, 1)[chosen].double().numpy()
        if first < last:
            out[first:last] = attend(numbers[first:last], keys, values, bias, spec)
    return out.reshape(len(q), -1)


def check_attention(case: AttentionCase, kernels: Kernels) -> None:
    """Hold one case against float64."""
    problem = attention_problem(case)
    error = problem.error(problem.answer(kernels))
    assert error < TOLERANCE[case.activation], f"{case.name}: off by {error}"


def check_nan_stays(kernels: Kernels, device: str = "cpu") -> None:
    """A NaN among one sequence's values is in that sequence's output and in no other's."""
    case = AttentionCase("neighbours", ((1, 60), (1, 60), (2, 20)), group=2)
    problem = attention_problem(case, device=device)
    problem.kv.values[problem.block_tables[1, 1], 3] = float("nan")
    out = problem.answer(kernels)
    assert out[1].isnan().all()
    out[1] = 0
    problem.expected[1] = 0
    assert problem.error(out) < TOLERANCE[case.activation]
