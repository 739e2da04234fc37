"""Which replicas were sent which prompt prefixes: digest of a block -> the replicas that have seen it.

What was sent is known here and at once; what a replica still has cached is not, and need not be: a prefix
that it has evicted is cold everywhere, and coming back to the same place makes it warm again. The size is
bounded by a hard limit of entries, least recently used first, and a chain's end before its beginning, because
a beginning without its end still matches. Both hold from when three quarters of the entries are taken: until
then nothing is near being dropped, and a chain keeps the place that it had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

MAX_ENTRIES = 1 << 18
MAX_BLOCKS = 2048
"""Of one request; prompts that agree so far are sent to the same place whatever follows."""
_MAX_BITS = 64


class PrefixIndex:
    """A bounded map from block digests to replicas. Plain and synchronous."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._next_bit = 0
        self._has_dropped = False

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, replica_id: str, hashes: Sequence[bytes]) -> int:
        """Note that a request with this chain of digests was sent to a replica.

        Returns how many leading blocks of it the replica was sent before, as `match_one` does.
        """
        bit = 1 << self._bit(replica_id)
        entries = self._entries
        get, move_to_end = entries.get, entries.move_to_end
        is_roomy = not self._has_dropped and 4 * len(entries) <= 3 * self._max_entries
        depth = num_matched = min(len(hashes), MAX_BLOCKS)
        for digest in reversed(hashes[:MAX_BLOCKS]):
            depth -= 1
            mask = get(digest, 0)
            if not mask & bit:
                entries[digest] = mask | bit
                num_matched = depth
            elif is_roomy:  # nothing was dropped yet, so what precedes this block is here as well
                break
            move_to_end(digest)
        while len(entries) > self._max_entries:
            self._has_dropped = True
            entries.popitem(last=False)
        return num_matched

    def match(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """Return how many leading blocks of the chain each replica was sent; those with none are left out."""
        candidates = self._live()
        matched: dict[str, int] = {}
        get = self._entries.get
        for depth, digest in enumerate(hashes[:MAX_BLOCKS]):
            mask = get(digest, 0) & candidates
            if mask == candidates:
                continue
            if depth:
                matched.update(dict.fromkeys(self._replicas(candidates & ~mask), depth))
            candidates = mask
            if not candidates:
                return matched
        matched.update(dict.fromkeys(self._replicas(candidates), min(len(hashes), MAX_BLOCKS)))
        return matched if hashes else {}

    def match_one(self, replica_id: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain one replica was sent."""
        bit = self._bits.get(replica_id)
        if bit is None:
            return 0
        entries, mask = self._entries, 1 << bit
        for depth, digest in enumerate(hashes[:MAX_BLOCKS]):
            if not entries.get(digest, 0) & mask:
                return depth
        return min(len(hashes), MAX_BLOCKS)

    def forget(self, replica_id: str) -> None:
        """Drop a replica that was removed or has restarted with an empty cache."""
        self._bits.pop(replica_id, None)

    def _bit(self, replica_id: str) -> int:
        if replica_id not in self._bits:
            if self._next_bit >= max(_MAX_BITS, 2 * len(self._bits)):
                self._renumber()
            self._bits[replica_id] = self._next_bit
            self._next_bit += 1
        return self._bits[replica_id]

    def _renumber(self) -> None:
        """Make forgotten bits usable again, which takes a walk over all entries: once in many restarts."""
        moves = [(1 << old, 1 << new) for new, old in enumerate(self._bits.values())]
        kept: OrderedDict[bytes, int] = OrderedDict()
        for digest, mask in self._entries.items():
            moved = sum(new for old, new in moves if mask & old)
            if moved:
                kept[digest] = moved
        self._entries = kept
        self._bits = {replica_id: bit for bit, replica_id in enumerate(self._bits)}
        self._next_bit = len(self._bits)

    def _live(self) -> int:
        return sum(1 << bit for bit in self._bits.values())

    def _replicas(self, mask: int) -> Iterator[str]:
        return (replica_id for replica_id, bit in self._bits.items() if mask >> bit & 1)
