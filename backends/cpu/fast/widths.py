"""Which groups of activations are wide: all, none, or those where rounding to 8 bits would cost the most.

What rounding adds to a product grows with the square of a group's scale, and a trained model has the same
few channels large whatever it reads: in SmolLM2 a quarter of the groups has 55 to 87 % of it. So one run over
a few tokens at load tells which groups they are. Fixed from then on, they are the same for every row of a
product, and a result still depends on no batch; but where a pool or a context has no room for that run, or the
pool holds other numbers, groups of about the same size may be chosen otherwise. docs/performance.md has what
each share costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.types import EngineSettings, ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARES = {"precise": (1.0, 1.0), "mixed": (0.25, 0.5), "int8": (0.0, 0.0)}
"""By EngineSettings.activations: the share of wide groups where rows are tokens, and where they are samples."""
NUM_TOKENS, EVERY = 64, 8
"""What is looked at, and behind every how many of these for the logits."""


@dataclass(frozen=True, slots=True)
class Widths:
    """The groups of one value that products read. `wide` and `noise` are mutable, at fixed addresses."""

    wide: NDArray[np.uint8]
    """[groups], 1: wide."""
    noise: NDArray[np.float32]
    """[groups], squares of scales, added up while `wide` is all ones."""
    num_wide: int

    @classmethod
    def of(cls, groups: int, share: float) -> Widths:
        """At least one group of those that shall be a share."""
        num_wide = max(1, round(share * groups)) if share > 0 else 0
        wide = np.full(groups, num_wide > 0, np.uint8)
        return cls(wide, np.zeros(groups, np.float32), num_wide)

    def choose(self) -> None:
        """Make the loudest groups wide; of equal ones the first."""
        loudest = np.argsort(-np.nan_to_num(self.noise), kind="stable")[: self.num_wide]
        self.wide[:] = 0
        self.wide[loudest] = 1


def trial_batch(
    settings: EngineSettings, vocab_size: int, num_blocks: int, num_groups: int
) -> ForwardBatch:
    """Return a prompt of tokens drawn once and for all, as long as a context and the pool allow."""
    rows = min(NUM_TOKENS, settings.max_model_len, num_blocks * settings.block_size)
    tokens = np.random.default_rng(0).integers(0, vocab_size, NUM_TOKENS)[:rows].tolist()
    blocks = range(-(-rows // settings.block_size))
    step = SequenceStep(tokens, 0, blocks, range((rows - 1) % EVERY, rows, EVERY))
    size = settings.block_size
    return forward_batch([step], block_size=size, num_groups=max(1, num_groups))
