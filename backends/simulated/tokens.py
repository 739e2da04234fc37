"""Made-up tokens: numbers that depend on seed and position only, so that a simulated run repeats exactly.

A seed says where in one fixed table of well-spread numbers its tokens begin, so that a run of a thousand
tokens is one slice.
"""

from __future__ import annotations

import functools
from array import array

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_TABLE_BITS = 16
_PLACES = (1 << _TABLE_BITS) - 1
_SEED_SHIFT = 64 - _TABLE_BITS


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-spread 64-bit numbers, equal for equal inputs (splitmix64, Steele et al. 2014)."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


class MadeUpTokens:
    """What seeds draw at positions, for one size of vocabulary, which is below 2**32."""

    def __init__(self, vocab_size: int) -> None:
        self._table = _table(vocab_size)
        self._stretch = array("I", self._table.tobytes())

    def drawn(self, contexts: NDArray[np.uint64], seeds: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the tokens at contexts [R], mostly positions, of seeds [R], which are 0 for greedy rows."""
        starts = (seeds * _GOLDEN) >> np.uint64(_SEED_SHIFT)
        tokens: NDArray[np.int32] = self._table[(contexts + starts) & np.uint64(_PLACES)].view(
            np.int32
        )
        return tokens

    def in_a_row(self, seed: int, first: int, count: int) -> array[int]:
        """Return what `drawn` says of `count` positions from `first` on, of typecode I."""
        start = ((seed * int(_GOLDEN)) % 2**64 >> _SEED_SHIFT) + first & _PLACES
        tokens = self._stretch[start : start + count]
        while len(tokens) < count:
            tokens += self._stretch[: count - len(tokens)]
        return tokens


@functools.lru_cache(maxsize=8)
def _table(vocab_size: int) -> NDArray[np.uint32]:
    mixed = mix(np.arange(1 << _TABLE_BITS, dtype=np.uint64))
    spread = ((mixed >> np.uint64(32)) * np.uint64(vocab_size)) >> np.uint64(32)
    return spread.astype(np.uint32)
