"""Which steps of decodes are left to the workers while the host does its part.

With one worker the host joins it once it has nothing else to do (see ThreadPool.wait): up to
MAX_SHARED_TOKENS that only gains. With more of them nobody joins: a step has one thread fewer, and in
exchange no pause for planning and news between two of them. Where memory is what it waits for, that gains;
how much depends on model, context and machine, so it is tried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

MAX_SHARED_TOKENS = 64
"""Who comes new waits for the one that was launched ahead: larger steps are too long for that."""
MAX_TOKENS = 4
"""Larger steps keep all threads: they wait for the vector units."""
TRIED_STEPS, SKIPPED_STEPS, KEPT_STEPS = 9, 2, 1024
"""Steps in each of the two ways, those not counted, and steps for which the better way is kept."""
FEW_KV_ROWS = 1023
"""Up to so many, rows matter little beside the weights; beyond, each power of two is tried on its own."""
LONGEST_PAUSE_SECONDS = 0.005
"""Between two steps that follow each other; behind a longer one the engine had nothing to do."""


@dataclass(slots=True)
class _Kind:
    """Steps of about the same size. Mutable."""

    is_beside: bool = True
    is_kept: bool = False
    seconds: list[float] = field(default_factory=list)
    tried: float = 0.0
    """What a step took beside its caller."""

    def note(self, seconds: float) -> None:
        """Count a step, of the way that is on, by what it took from one result to the next."""
        self.seconds.append(seconds)
        if len(self.seconds) < (KEPT_STEPS if self.is_kept else TRIED_STEPS):
            return
        found = median(self.seconds[SKIPPED_STEPS:])
        self.seconds.clear()
        if self.is_kept:
            self.is_kept, self.is_beside = False, True
        elif self.is_beside:
            self.tried, self.is_beside = found, False
        else:
            self.is_kept, self.is_beside = True, self.tried <= found


class BesideTrial:
    """Decides, step by step, and learns from when results came. Mutable."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._last: tuple[_Kind, bool, float] | None = None
        """Of the last step: its kind, whether it ran beside, and when its result was there."""

    def allows(self, num_tokens: int, num_kv_rows: int) -> bool:
        """Whether steps of so many tokens and rows of keys run beside their caller now."""
        return num_tokens <= MAX_TOKENS and self._kind(num_tokens, num_kv_rows).is_beside

    def note(
        self, num_tokens: int, num_kv_rows: int, *, beside: bool, begun: float, now: float
    ) -> None:
        """Say that a step, described at `begun`, gave its result. Seconds of one clock."""
        if num_tokens > MAX_TOKENS:
            self._last = None
            return
        kind, last = self._kind(num_tokens, num_kv_rows), self._last
        self._last = kind, beside, now
        if last is None or kind.is_beside != beside or begun - last[2] > LONGEST_PAUSE_SECONDS:
            return
        if last[0] is kind and last[1] == beside:
            kind.note(now - last[2])

    def _kind(self, num_tokens: int, num_kv_rows: int) -> _Kind:
        size = num_tokens, max(num_kv_rows, FEW_KV_ROWS).bit_length()
        if size not in self._kinds:
            self._kinds[size] = _Kind()
        return self._kinds[size]
