"""Draws a step's tokens with the sampling kernel: torch and Numba's own pool, whose threads spin, stay asleep.

Large draws are shared with threads that sleep in between: a hand-over costs 0.1 ms, a row up to 0.2 ms.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.draw import Draw
from headrace.backends.cpu.fast.arena import address
from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


SHARED_LOGITS = 1 << 20
"""From this many logits on, other threads draw too."""


class FastSampler:
    """Mutable: `drawn` is what the last step gave or will give. `close` ends its threads."""

    def __init__(self, num_threads: int) -> None:
        self.drawn: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_threads = num_threads
        self._scratch = np.empty((num_threads, 0), np.float32)
        self._draw_share: Any = None
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "headrace-draw")

    def load(self) -> None:
        """Load the kernel. Once, before any draw; the first time ever it is compiled."""
        from headrace.backends.cpu.fast.kernels_draw import draw_share

        self._draw_share = draw_share

    @property
    def address(self) -> int:
        """Of the function that draws: see layout's DRAW."""
        return int(self._draw_share.address)

    def close(self) -> None:
        self._helpers.shutdown()

    def prepare(self, logits: tuple[int, int, int], sampling: SamplingBatch) -> Draw:
        """Return a draw of unmasked rows for whoever computes the logits. `drawn` is what it will give."""
        draw = Draw(logits, self._scratch_for(logits[2]), sampling, None)
        self.drawn = draw.token_ids
        return draw

    def _scratch_for(self, vocab_size: int) -> NDArray[np.float32]:
        if self._scratch.shape[1] < 2 * vocab_size:
            self._scratch = np.empty((self._num_threads, 2 * vocab_size), np.float32)
        return self._scratch

    def sample(
        self,
        logits: tuple[int, int, int],
        sampling: SamplingBatch,
        masks: TokenMasks | None,
        num_threads: int,
    ) -> StepResult:
        """`logits`: address, bytes from row to row, and vocabulary size."""
        vocab_size = logits[2]
        num_rows = len(sampling.temperature)
        draw = Draw(logits, self._scratch_for(vocab_size), sampling, masks)
        shares = min(num_threads, num_rows) if num_rows * vocab_size >= SHARED_LOGITS else 1
        arguments = draw.native()
        others = [
            self._helpers.submit(self._draw_share.ctypes, share, shares, address(arguments))
            for share in range(1, shares)
        ]
        self._draw_share.ctypes(0, max(1, shares), address(arguments))
        for other in others:
            other.result()
        self.drawn = draw.token_ids
        return draw.result()
