"""The launches that draw one token per row: cuda/sampling.cu says what each does.

Blocks of a row meet only between launches, so a digit of a cut costs one. A batch without filters takes two
launches and the finish.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.backends.gpu.device import Launcher
from headrace.backends.gpu.kernels import Draw
from headrace.backends.gpu.sampling_arguments import blocks_per_row

THREADS = 256
BINS, LEVELS, MODES, CUT_WORDS = 2048, 5, 3, 4
PARTIAL_WORDS = 2
CUT_SHARED_BYTES = 128 + BINS * 8
ROWS = np.dtype(
    [
        *((name, np.uint64) for name in ("raw", "adjusted", "floats", "ints", "cuts")),
        *((name, np.uint64) for name in ("histograms", "maxima")),
        ("vocab", np.int32),
        ("num_rows", np.int32),
    ]
)
"""`Rows` of sampling.cu: seven addresses and two counts."""
MAX_VOCABULARY = 1 << 22


def launch_sampling(
    launcher: Launcher, num_multiprocessors: int, logits: torch.Tensor, draw: Draw
) -> None:
    """Draw for logits [R, vocab] f32. Scratch comes from torch's allocator."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "logits are dense f32"
    assert vocab <= MAX_VOCABULARY, f"{vocab} tokens; an id has 22 bits"
    device = logits.device
    shares = blocks_per_row(num_rows, vocab, num_multiprocessors)
    modes = [
        mode
        for mode, used in enumerate(
            (draw.filters_by_count, draw.filters_by_mass, draw.most_logprobs > 0)
        )
        if used
    ]
    empty = torch.empty(0, device=device)
    adjusted = torch.empty_like(logits) if draw.adjusts else empty
    adjust_failed = torch.zeros(num_rows, dtype=torch.int32, device=device)
    cuts = torch.empty(MODES, LEVELS + 1, num_rows, CUT_WORDS, dtype=torch.int64, device=device)
    sizes = (MODES, LEVELS, num_rows, BINS) if modes else (0,)
    histograms = torch.empty(sizes, dtype=torch.int64, device=device)
    for mode in modes:
        histograms[mode].zero_()
    maxima = torch.empty(num_rows, shares, 4, device=device)
    held = (logits, adjusted, draw.floats, draw.ints, cuts, histograms, maxima)
    rows = np.array((*(tensor.data_ptr() for tensor in held), vocab, num_rows), ROWS)[()]
    defines = {"VECTOR": 4 if vocab % 4 == 0 and logits.data_ptr() % 16 == 0 else 1}
    if draw.adjusts:
        launcher.kernel("sampling.cu", "adjust_rows", defines)(
            (num_rows, 1, 1), THREADS, THREADS // 32 * 4,
            (
                logits, adjusted, draw.floats, draw.ints, draw.history_ids, draw.history_counts,
                draw.bias_ids, draw.bias_values, draw.masks, adjust_failed, np.int32(vocab),
            ),
        )  # fmt: skip
    grid = (shares, num_rows, 1)
    statistics = launcher.kernel("sampling.cu", "row_statistics", defines)
    statistics(grid, THREADS, THREADS // 32 * 16, (rows,))
    cut = launcher.kernel("sampling.cu", "cut_rows", defines)
    for mode in modes:
        for level in range(LEVELS + 1):
            arguments = (rows, np.int32(mode), np.int32(level), np.int32(shares))
            cut(grid if level < LEVELS else (1, num_rows, 1), THREADS, CUT_SHARED_BYTES, arguments)
    _draw_and_finish(launcher, defines, rows, shares, draw, adjust_failed)


def _draw_and_finish(
    launcher: Launcher,
    defines: dict[str, int],
    rows: Any,
    shares: int,
    draw: Draw,
    adjust_failed: torch.Tensor,
) -> None:
    num_rows = int(rows["num_rows"])
    device = draw.floats.device
    most = max(1, draw.most_logprobs)
    partials = torch.empty(num_rows, shares, PARTIAL_WORDS, dtype=torch.int64, device=device)
    sums = torch.zeros(num_rows, dtype=torch.int64, device=device)
    listed = torch.empty(num_rows, most, dtype=torch.int64, device=device)
    num_listed = torch.zeros(num_rows, dtype=torch.int32, device=device)
    launcher.kernel("sampling.cu", "draw_shares", defines)(
        (shares, num_rows, 1), THREADS, THREADS // 32 * 16,
        (
            rows, draw.seeds, draw.positions, partials, sums, listed, num_listed, np.int32(most),
        ),
    )  # fmt: skip
    launcher.kernel("sampling.cu", "finish_rows", defines)(
        (num_rows, 1, 1), 32, 0,
        (
            rows, partials, sums, listed, adjust_failed, draw.token_ids, draw.failed, draw.logprobs,
            draw.top_token_ids, draw.top_logprobs, np.int32(most), np.int32(shares),
        ),
    )  # fmt: skip
