"""Reusable blocks that hold known prefixes, in the order an eviction policy gives them.

A heap with entries that are passed over once they no longer count, and a second one of the times at
which the policy wants to be asked again. Where the policy's order is that of release, the pool's plain
list does, and none of this runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.interfaces import EvictionPolicy
from headrace.types import BlockView


@dataclass(slots=True, order=True)
class _Entry:
    """A block's place. `turn` counts releases, so that equal values keep their order."""

    value: tuple[float, ...]
    turn: int
    block_id: int = field(compare=False)
    ask_again_at: float | None = field(compare=False)


class KeyedOrder:
    """Blocks by the value of their key, the lowest first. O(log blocks) for each change."""

    def __init__(self, policy: EvictionPolicy, view: Callable[[int], BlockView]) -> None:
        """`view` shows a block as it is now; `policy` may be guarded or not."""
        self._policy = policy
        self._view = view
        self._entries: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []
        self._asks: list[tuple[float, int, _Entry]] = []
        self._turns = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids, the first to be evicted first, by what is known of them now."""
        return (entry.block_id for entry in sorted(self._entries.values()))

    def add(self, block_id: int, now: float) -> None:
        self._place(block_id, next(self._turns), now)

    def remove(self, block_id: int) -> None:
        del self._entries[block_id]
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
            self._asks = [ask for ask in self._asks if self._counts(ask[2])]
            heapq.heapify(self._asks)

    def pop(self, now: float) -> int:
        """Take out the block to be evicted; there is at least one."""
        while self._asks and self._asks[0][0] <= now:
            entry = heapq.heappop(self._asks)[2]
            if self._counts(entry):
                self._place(entry.block_id, entry.turn, now)
        while True:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                del self._entries[entry.block_id]
                return entry.block_id

    def _place(self, block_id: int, turn: int, now: float) -> None:
        value, ask_again_at = self._policy.key(self._view(block_id), now)
        value = value if isinstance(value, tuple) else (value,)
        entry = self._entries[block_id] = _Entry(value, turn, block_id, ask_again_at)
        heapq.heappush(self._heap, entry)
        if ask_again_at is not None:
            heapq.heappush(self._asks, (ask_again_at, turn, entry))

    def _counts(self, entry: _Entry) -> bool:
        return self._entries.get(entry.block_id) is entry
