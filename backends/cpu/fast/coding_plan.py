"""How groups of activations are coded: with 15 bits or 8, and with what loud inputs are made smaller by.

What rounding adds to a product grows with the square of a group's scale, and a trained model has the same
few channels large whatever it reads. So one run over a few tokens at load tells which they are. Two things
help. A loud input is halved up to three times and its weights' codes doubled as often, which is exact where
those are of 4 or 5 bits in a byte: then the other inputs of its group have the finer scale that they would have
alone, at no cost (SmoothQuant, Xiao et al. 2022, in powers of two). And a wide group has 15 bits, which costs
a second product: the loudest groups of what the logits come from, and of what meets weights without room.
Fixed from then on, a plan is the same for every row of a product, and a result still depends on no batch;
but where a pool or a context has no room for that run, or the pool holds other numbers, inputs of about the
same size may be planned otherwise. docs/performance.md has what each choice costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.kernels_coding import (
    GROUP,
    PLAN_BYTES,
    PLAN_DOUBLES,
    PLAN_FACTORS,
    PLAN_SHARES,
    PLAN_WIDE,
)
from headrace.backends.cpu.fast.kernels_tiles import FORMS_WITH_ROOM
from headrace.backends.cpu.fast.layout import TOKENS
from headrace.types import EngineSettings, ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARES = {"precise": (1.0, 1.0), "mixed": (0.25, 0.5), "int8": (0.0, 0.0)}
"""By EngineSettings.activations: the share of wide groups where rows are tokens, and where they are samples."""
MOST_HALVINGS, MOST_LOUD = 3, 7
"""How often an input is halved at most, and how many of a group are: were half of them, and the others
quiet in the trial alone, rounding would add five times as much as without a plan."""
NUM_TOKENS, EVERY = 64, 8
"""What is looked at, and behind every how many of these for the logits."""
_PLAN = np.dtype(
    {
        "names": ["factors", "wide", "doubles", "shares"],
        "formats": [(np.uint8, GROUP), np.uint8, np.uint8, (np.float32, GROUP)],
        "offsets": [PLAN_FACTORS, PLAN_WIDE, PLAN_DOUBLES, PLAN_SHARES],
        "itemsize": PLAN_BYTES,
    }
)


@dataclass(slots=True)
class CodingPlan:
    """Of one value that products read. `groups` and `loudness` are mutable, at fixed addresses."""

    groups: NDArray[np.void]
    """[groups], as in kernels_coding: what inputs are divided by and their weights multiplied, flags."""
    loudness: NDArray[np.float32]
    """[groups * 32], the largest magnitudes seen by the trial."""
    domain: int
    share: float
    """Of groups that shall be wide."""
    has_room: bool = True
    """Whether all weights that meet it can be doubled."""

    @classmethod
    def of(cls, groups: int, domain: int, activations: str) -> CodingPlan:
        """Until it is chosen all groups are wide, or none."""
        share = SHARES[activations][domain]
        plan = np.zeros(groups, _PLAN)
        plan["factors"], plan["shares"], plan["wide"] = 1, 1.0, share > 0
        return cls(plan, np.zeros(groups * GROUP, np.float32), domain, share)

    def meets(self, form: int) -> None:
        """Note that a weight of a form will be multiplied with it."""
        self.has_room &= form in FORMS_WITH_ROOM

    @property
    def is_open(self) -> bool:
        """Whether what a trial sees decides anything."""
        return self.share < 1 and (self.share > 0 or self.has_room)

    @property
    def num_wide(self) -> int:
        """How many groups are chosen to be wide: at least one of those that shall be a share."""
        if self.share == 0 or (self.share < 1 and self.has_room and self.domain == TOKENS):
            return 0
        return max(1, round(self.share * len(self.groups)))

    def choose(self) -> None:
        """Make the loudest groups wide, of equal ones the first, and loud inputs of the others smaller."""
        loudness = np.nan_to_num(self.loudness, nan=0.0).astype(np.float64).reshape(-1, GROUP)
        loudest = np.argsort(-loudness.max(axis=1), kind="stable")[: self.num_wide]
        self.groups["wide"] = 0
        self.groups["wide"][loudest] = 1
        if not self.has_room:
            return
        usual = np.maximum(np.sort(loudness, axis=1)[:, [-1 - MOST_LOUD]], 1e-30)
        halvings = np.rint(np.log2(np.maximum(loudness / usual, 1.0)) - 0.5)
        halvings = np.clip(halvings, 0, MOST_HALVINGS).astype(np.int64)
        halvings[loudest] = 0
        self.groups["factors"] = 1 << halvings
        self.groups["shares"] = 0.5**halvings
        self.groups["doubles"] = halvings.any(axis=1)


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
