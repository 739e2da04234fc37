"""When the policy is asked for the order of those who wait, and what it is shown then.

The order matters only where somebody can start, so it is asked for when someone came, when a place
became free, when another policy decides, and at the time the policy itself asked for.
"""

from __future__ import annotations

import math

from headrace.engine.kv_cache import KVCache
from headrace.engine.sequence import Sequence
from headrace.interfaces import SchedulingPolicy
from headrace.types import SchedulerView
from headrace.types.views import set_fact

RANK_INTERVAL_SECONDS = 0.05
"""A policy that does not say when to ask again is asked at this interval while a slot is free and the
best waiting request does not fit: time may change its mind."""


class Ranking:
    """Keeps the order of the waiting as fresh as it has to be."""

    def __init__(self, policy: SchedulingPolicy, kv_cache: KVCache) -> None:
        self._policy = policy
        self._kv_cache = kv_cache
        self._is_stale = False
        self._epoch = 0
        self._ranked_at = 0.0
        self._asked_at: float | None = None
        """When the policy wants to be asked again; None: it does not say, inf: never."""
        self._num_publications = -1
        self.num_to_start: float = math.inf
        """How many more of the order may start while prompts are being computed."""

    def note_arrival(self, sequence: Sequence) -> None:
        """Someone waits who did not: its view stays as it is now until it starts."""
        sequence.refresh_view()
        self._is_stale = True

    def note_free_place(self) -> None:
        """A slot or blocks became free."""
        if not getattr(deciding(self._policy), "is_order_fixed", False):
            self._is_stale = True

    def next_decision_at(self, *, has_free_slot: bool) -> float | None:
        """Return when the order is to be asked for again though nothing changed; None: never."""
        if self._asked_at is None:
            return self._ranked_at + RANK_INTERVAL_SECONDS if has_free_slot else None
        return self._asked_at if self._asked_at < math.inf else None

    def is_due(self, now: float, *, has_free_slot: bool) -> bool:
        """Whether the order known may not be that of now."""
        if self._is_stale or getattr(self._policy, "epoch", 0) != self._epoch:
            return True
        at = self.next_decision_at(has_free_slot=has_free_slot)
        return at is not None and now >= at

    def order(self, waiting: list[Sequence], view: SchedulerView) -> list[Sequence]:
        """Ask the policy, and when it wants to be asked again."""
        self._is_stale = False
        self._epoch = getattr(self._policy, "epoch", 0)
        self._ranked_at = view.now
        chosen = deciding(self._policy)
        if getattr(chosen, "needs_prefixes", False):
            self._look_up_prefixes(waiting)
        order = self._policy.rank_waiting([sequence.view for sequence in waiting], view)
        by_view = {id(sequence.view): sequence for sequence in waiting}
        self._asked_at = math.inf if getattr(chosen, "is_order_fixed", False) else None
        if hasattr(chosen, "next_decision_at"):
            at = self._policy.next_decision_at(view)  # type: ignore[attr-defined]
            self._asked_at = math.inf if at is None else at
        self.num_to_start = math.inf
        if hasattr(chosen, "num_to_start"):
            self.num_to_start = self._policy.num_to_start(view)  # type: ignore[attr-defined]
        return [by_view[id(each)] for each in order]

    def _look_up_prefixes(self, waiting: list[Sequence]) -> None:
        """Show what the prefix cache would give each now, where it has changed since the last look."""
        num_publications = self._kv_cache.pool.num_publications
        for sequence in waiting:
            if sequence.num_cached_tokens is None and num_publications != self._num_publications:
                hits = len(self._kv_cache.cached_blocks(sequence))
                num_cached_tokens = hits * self._kv_cache.block_size
                set_fact(sequence.view, "num_cached_tokens", num_cached_tokens)
        self._num_publications = num_publications


def deciding(policy: SchedulingPolicy) -> SchedulingPolicy:
    """Return whoever decides: of a guard, the policy it guards or the built-in in its place."""
    chosen: SchedulingPolicy = getattr(policy, "deciding", policy)
    return chosen
