"""Draws a step's tokens in Numba's own threads, and keeps what was drawn last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.cpu.draw import Draw
from headrace.backends.cpu.kernels_sampling import sample_parallel, sample_share
from headrace.backends.cpu.team import Team
from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Sampler:
    """Draws a step's tokens. Mutable: `drawn` is what the last step gave."""

    def __init__(self, team: Team) -> None:
        self.drawn: NDArray[np.int32] = np.zeros(0, np.int32)
        self._team = team
        self._scratch = np.empty((team.size, 0), np.float32)

    def sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, masks: TokenMasks | None
    ) -> StepResult:
        num_rows, vocab_size = logits.shape
        if self._scratch.shape[1] < 2 * vocab_size:
            self._scratch = np.empty((self._team.size, 2 * vocab_size), np.float32)
        where = (logits.data_ptr(), logits.stride(0) * 4, vocab_size)
        draw = Draw(where, self._scratch, sampling, masks)
        work = 0 if num_rows == 1 else logits.numel()
        self._team.run(sample_share, sample_parallel, work, *draw.arguments)
        self.drawn = draw.token_ids
        return draw.result()
