"""The launches that draw one token per row: kernels/sampling.py says what each does.

Blocks of a row meet only between launches, so that each digit of a cut costs one. A batch without filters takes
two launches and the finish.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.backends.gpu.device import Launcher
from headrace.backends.gpu.kernels import Draw
from headrace.backends.gpu.sampling_arguments import blocks_per_row

THREADS = 256
BINS, LEVELS, MODES, CUT_WORDS = 2048, 5, 3, 4
MAX_VOCABULARY = 1 << 22


def launch_sampling(
    launcher: Launcher, num_multiprocessors: int, logits: torch.Tensor, draw: Draw
) -> None:
    """Draw for dense logits [R, vocab] f32. Scratch comes from torch's allocator."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "logits are dense f32"
    assert vocab <= MAX_VOCABULARY, f"{vocab} tokens; an id has 22 bits"
    device = logits.device
    shares = blocks_per_row(num_rows, vocab, num_multiprocessors)
    adjusted, adjust_failed = _adjust(launcher, logits, draw)
    maxima = torch.empty(num_rows, shares, 4, device=device)
    defines = {"vector": 4 if vocab % 4 == 0 and logits.data_ptr() % 16 == 0 else 1}
    launcher.kernel("sampling", "row_statistics", defines)(
        (shares, num_rows, 1), THREADS, 0, (logits, adjusted, draw.ints, maxima, np.int32(vocab))
    )
    cuts = _cut(launcher, defines, logits, adjusted, draw, maxima)
    scores = torch.empty(num_rows, shares, dtype=torch.float64, device=device)
    tokens = torch.empty(num_rows, shares, dtype=torch.int64, device=device)
    sums = torch.zeros(num_rows, dtype=torch.int64, device=device)
    most = max(1, draw.most_logprobs)
    listed = torch.empty(num_rows, most, dtype=torch.int64, device=device)
    num_listed = torch.zeros(num_rows, dtype=torch.int32, device=device)
    launcher.kernel("sampling", "draw_shares", defines)(
        (shares, num_rows, 1), THREADS, 0,
        (
            logits, adjusted, draw.floats, draw.ints, cuts, maxima, draw.seeds, draw.positions, scores,
            tokens, sums, listed, num_listed, np.int32(vocab), np.int32(num_rows), np.int32(most),
        ),
    )  # fmt: skip
    launcher.kernel("sampling", "finish_rows", {})(
        (num_rows, 1, 1), 32, 0,
        (
            logits, draw.ints, maxima, scores, tokens, sums, listed, adjust_failed, draw.token_ids,
            draw.failed, draw.logprobs, draw.top_token_ids, draw.top_logprobs, np.int32(vocab),
            np.int32(most), np.int32(shares),
        ),
    )  # fmt: skip


def _adjust(
    launcher: Launcher, logits: torch.Tensor, draw: Draw
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the adjusted logits, where some row has any, and which rows nothing is left of."""
    num_rows, vocab = logits.shape
    failed = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    if not draw.adjusts:
        return None, failed
    adjusted = torch.empty_like(logits)
    launcher.kernel("sampling", "adjust_rows", {})(
        (num_rows, 1, 1), THREADS, 0,
        (
            logits, adjusted, draw.floats, draw.ints, draw.history_ids, draw.history_counts,
            draw.bias_ids, draw.bias_values, draw.masks, failed, np.int32(vocab),
        ),
    )  # fmt: skip
    return adjusted, failed


def _cut(
    launcher: Launcher,
    defines: Mapping[str, int],
    logits: torch.Tensor,
    adjusted: torch.Tensor | None,
    draw: Draw,
    maxima: torch.Tensor,
) -> torch.Tensor | None:
    """Return the cuts of every mode that some row needs; by count before by mass, which starts from it."""
    num_rows, vocab = logits.shape
    shares = maxima.shape[1]
    needed = draw.filters_by_count, draw.filters_by_mass, draw.most_logprobs > 0
    if not any(needed):
        return None
    device = logits.device
    cuts = torch.empty(MODES, LEVELS + 1, num_rows, CUT_WORDS, dtype=torch.int64, device=device)
    histograms = torch.empty(MODES, LEVELS, num_rows, BINS, dtype=torch.int64, device=device)
    cut = launcher.kernel("sampling", "cut_rows", defines)
    for mode in range(MODES):
        if not needed[mode]:
            continue
        histograms[mode].zero_()
        for level in range(LEVELS + 1):
            grid = (shares if level < LEVELS else 1, num_rows, 1)
            arguments = (
                logits, adjusted, draw.floats, draw.ints, cuts, histograms, maxima, np.int32(vocab),
                np.int32(num_rows), np.int32(mode), np.int32(level), np.int32(shares),
            )  # fmt: skip
            cut(grid, THREADS, 0, arguments)
    return cuts
