"""How fast it is: paged decode beside the copy ceiling and torch, the draw beside torch's, launches."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu.cases import BF16, FP8, AttentionCase

from gpu_check.stage import Stage

HEAD_DIM, GROUP, BLOCK_SIZE = 128, 4, 16
DECODE_TOLERANCE = {BF16: 2e-2, FP8: 6e-2}
"""Ours against torch's attention on the gathered rows, in bf16: norm of the difference over the norm.
With 8-bit rows what is gathered is rounded to bf16 once more."""
TOP_K, TOP_P = 50, 0.9


def measure_bandwidth(stage: Stage) -> None:
    """Measure the copy ceiling, then the decode of each batch in bf16 and in fp8."""
    ceiling = _copy_ceiling(stage)
    stage.measured("copy ceiling, TB/s", ceiling)
    rates: dict[tuple[str, str], float] = {}
    for name, lens in stage.sizes.decode_batches.items():
        took: dict[str, float] = {}
        for stored, label in ((BF16, "bf16"), (FP8, "fp8")):
            decode = make_decode(stage, lens, stored)
            took[label] = stage.microseconds(decode.run)
            rate = decode.bytes_read / took[label] / 1e6
            rates[name, label] = rate
            start = f"decode {name} {label}, "
            stage.measured(start + "us", took[label])
            stage.measured(start + "TB/s", rate)
            stage.measured(start + "% of copy", 100 * rate / ceiling)
            if name == "skewed":
                stage.measured(start + "% of even", 100 * rate / rates["even", label])
            torch_run = decode.torch_run()
            _judge_decode(stage, f"decode {name} {label} equals torch", decode, torch_run, stored)
            if label == "bf16":
                stage.measured(start + "x torch", stage.microseconds(torch_run) / took[label])
            else:
                stage.measured(start + "x bf16", took["bf16"] / took[label])
            del decode, torch_run


def _copy_ceiling(stage: Stage) -> float:
    """Return TB/s of a copy on the device, what is read and what is written together."""
    source = torch.zeros(stage.sizes.copy_bytes, dtype=torch.uint8, device=stage.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / stage.microseconds(lambda: target.copy_(source)) / 1e6


@dataclass(slots=True)
class Decode:
    """One layer's decode of a batch, ready to run: 4 query heads for each KV head."""

    run: Callable[[], None]
    out: torch.Tensor  # [S, heads * HEAD_DIM] bf16
    q: torch.Tensor  # the same
    kv: Any
    lens: Sequence[int]
    tables: np.ndarray[Any, Any]
    bytes_read: int
    """Keys, values and their scales."""

    def torch_run(self) -> Callable[[], torch.Tensor]:
        """Return what computes the same with torch, on rows gathered beforehand, equal lengths in one call."""
        from headrace.backends.torch_kv_pool import gather_rows

        calls, order = [], []
        heads = self.kv.keys.shape[2]
        queries = self.q.view(len(self.lens), heads * GROUP, 1, HEAD_DIM)
        for length in Counter(self.lens):
            chosen = [index for index, other in enumerate(self.lens) if other == length]
            rows = np.arange(length)
            slots = self.tables[chosen][:, rows // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            flat = torch.tensor((slots + rows % BLOCK_SIZE).reshape(-1), device=self.q.device)
            keys, values = (
                gather_rows(plane, scale, flat)
                .to(BF16)
                .view(len(chosen), length, heads, HEAD_DIM)
                .transpose(1, 2)
                .contiguous()
                for plane, scale in (
                    (self.kv.keys, self.kv.key_scale),
                    (self.kv.values, self.kv.value_scale),
                )
            )
            calls.append((queries[chosen].contiguous(), keys, values))
            order += chosen
        back = torch.tensor(np.argsort(order), device=self.q.device)

        def run() -> torch.Tensor:
            parts = [
                torch.nn.functional.scaled_dot_product_attention(*call, enable_gqa=True)
                for call in calls
            ]
            return torch.cat(parts)[back].view(len(back), -1)

        return run


def make_decode(stage: Stage, lens: Sequence[int], stored: torch.dtype) -> Decode:
    """Make a batch with shuffled blocks, planned as a step is."""
    from headrace.backends.gpu.step import GroupShape, blocks_wanted, device_work
    from headrace.backends.gpu.work_list import plan_attention
    from headrace.backends.torch_kv_pool import KVLayer, quantize_rows

    device, heads = stage.torch_device, stage.sizes.num_kv_heads
    case = AttentionCase("", tuple((1, n) for n in lens), HEAD_DIM, GROUP, heads, BF16, stored)
    counts = [-(-n // BLOCK_SIZE) for n in lens]
    shape = (sum(counts), BLOCK_SIZE, heads, HEAD_DIM)
    planes, scales = [], []
    for _ in range(2):
        numbers = torch.randn(shape, device=device, dtype=BF16)
        scale = None
        if stored == FP8:
            numbers, scale = quantize_rows(numbers.float(), stored)
        planes.append(numbers.contiguous())
        scales.append(scale)
    kv = KVLayer(planes[0], planes[1], 0, scales[0], scales[1])
    q = torch.randn(len(lens), GROUP * heads * HEAD_DIM, device=device).to(BF16)
    tile = stage.kernels.tile_tokens(case.spec, kv, BF16)
    planned = GroupShape(heads, HEAD_DIM, GROUP, None, tile)
    tables = np.full((len(lens), max(counts)), -1, np.int32)
    ids = np.random.default_rng(0).permutation(sum(counts))
    for row, count, first in zip(tables, counts, np.cumsum([0, *counts]), strict=False):
        row[:count] = ids[first : first + count]
    plan = plan_attention(
        np.arange(len(lens) + 1, dtype=np.int32), np.array(lens, np.int32), np.ones(len(lens), np.bool_),
        window=None, tile_tokens=tile, max_tokens=len(lens),
        blocks_wanted=blocks_wanted(planned, stage.device.num_multiprocessors),
    )  # fmt: skip
    work, out = device_work(plan, tables, planned, device), torch.empty_like(q)
    run = functools.partial(stage.kernels.paged_attention, q, kv, case.spec, work, out)
    of_row = HEAD_DIM * stored.itemsize + (4 if stored == FP8 else 0)
    return Decode(run, out, q, kv, lens, tables, sum(lens) * heads * 2 * of_row)


def _judge_decode(
    stage: Stage, name: str, decode: Decode, torch_run: Callable[[], torch.Tensor], stored: Any
) -> None:
    decode.out.fill_(float("nan"))
    decode.run()
    expected = torch_run().float()
    error = float((decode.out.float() - expected).norm() / expected.norm())
    stage.judged(name, error < DECODE_TOLERANCE[stored], f"{error:.1e}")


# --- the draw ---------------------------------------------------------------------------


def measure_sampling(stage: Stage) -> None:
    """Measure greedy and filtered draws beside argmax and torch's sort-based sampling."""
    from headrace.backends.batches import sampling_batch
    from headrace.backends.gpu.draw import fetch_result, upload_draw

    rows, vocab = stage.sizes.sampled
    logits = torch.randn(rows, vocab, device=stage.torch_device) * 3
    columns: Mapping[str, Mapping[str, Any]] = {
        "greedy": {},
        "top-k + top-p": {
            "temperature": np.ones(rows), "top_k": np.full(rows, TOP_K),
            "top_p": np.full(rows, TOP_P), "seeds": np.arange(rows, dtype=np.uint64),
        },
    }  # fmt: skip
    torch_draws = {"greedy": lambda: logits.argmax(dim=1), "top-k + top-p": lambda: drawn(logits)}
    for name, chosen in columns.items():
        sampling = sampling_batch(rows, chosen)
        draw = upload_draw(sampling, None, vocab, logits.device)
        took = stage.microseconds(functools.partial(stage.kernels.sample, logits, draw))
        start = f"sample 64 x 128k {name}, "
        stage.measured(start + "us", took)
        stage.measured(start + "x torch", stage.microseconds(torch_draws[name]) / took)
        tokens = torch.tensor(fetch_result(draw).token_ids, device=logits.device).long()
        ranks = (logits > logits.gather(1, tokens[:, None])).sum(dim=1)
        kept = 1 if name == "greedy" else TOP_K
        stage.judged(f"sample {name}: tokens among the best {kept}", bool((ranks < kept).all()))


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token per row by torch: sort, cut at TOP_K and TOP_P, one multinomial draw. Returns [R] i8."""
    values, ids = torch.sort(logits, dim=1, descending=True)
    weights = torch.softmax(values, dim=1)
    weights[:, TOP_K:] = 0
    before = torch.cumsum(weights, dim=1) - weights
    weights = weights.masked_fill(before >= TOP_P * weights.sum(dim=1, keepdim=True), 0)
    return ids.gather(1, torch.multinomial(weights, 1))[:, 0]


# --- launches ---------------------------------------------------------------------------


class Noting:
    """A launcher that remembers the last launch, kernel and arguments, as it passes it on."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher
        self.last: tuple[Any, tuple[Any, ...]] | None = None

    def kernel(self, *key: Any) -> Callable[..., None]:
        found = self._launcher.kernel(*key)

        def launch(*arguments: Any) -> None:
            self.last = found, arguments
            found(*arguments)

        return launch


def measure_launches(stage: Stage) -> None:
    """Measure the host's time of one launch, and of the operation around it, on a row of 64."""
    x = torch.randn(1, 64, device=stage.torch_device).to(BF16)
    weight, out = torch.ones(64, device=stage.torch_device), torch.empty_like(x)
    run = functools.partial(stage.kernels.rms_norm, x, None, weight, 1e-6, 1, out)
    launcher = stage.kernels._launcher
    noting = Noting(launcher)
    stage.kernels._launcher = noting
    try:
        run()
    finally:
        stage.kernels._launcher = launcher
    assert noting.last is not None, "the norm launches a kernel"
    kernel, arguments = noting.last
    launch = functools.partial(kernel, *arguments)
    stage.measured("host time of a prepared launch, us", _host_time(stage, launch))
    stage.measured("host time of an operation, us", _host_time(stage, run))


def _host_time(stage: Stage, run: Callable[[], None], rounds: int = 15) -> float:
    """Median microseconds of a call; rounds are short, so that the queue of launches never fills."""
    count = stage.sizes.launches
    times = []
    for _ in range(rounds if count > 10 else 1):
        stage.device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        times.append((time.perf_counter() - start) / count * 1e6)
    stage.device.synchronize()
    return sorted(times)[len(times) // 2]
