"""Made-up tokens: numbers that depend on seed and position only, so that a simulated run repeats exactly."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STRETCH = 512
_MAX_KEPT = 4096


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-spread 64-bit numbers, equal for equal inputs (splitmix64, Steele et al. 2014)."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def drawn_tokens(
    contexts: NDArray[np.uint64], seeds: NDArray[np.uint64], vocab_size: int
) -> NDArray[np.int32]:
    """Return made-up tokens for contexts [R] and seeds [R], which are 0 for greedy rows."""
    return (mix(contexts ^ mix(seeds)) % np.uint64(vocab_size)).astype(np.int32)


class TokenStreams:
    """The tokens that seeds draw at one position after the other, made a stretch at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kept: dict[tuple[int, int], array[int]] = {}

    def tokens(self, seed: int, first: int, count: int) -> array[int]:
        """Return the tokens at `count` positions from `first` on, of typecode I."""
        number, start = divmod(first, _STRETCH)
        tokens = self._stretch(seed, number)[start : start + count]
        while len(tokens) < count:
            number += 1
            tokens += self._stretch(seed, number)[: count - len(tokens)]
        return tokens

    def _stretch(self, seed: int, number: int) -> array[int]:
        kept = self._kept.get((seed, number))
        if kept is not None:
            return kept
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        positions = np.arange(number * _STRETCH, (number + 1) * _STRETCH, dtype=np.uint64)
        drawn = drawn_tokens(positions, np.array([seed], np.uint64), self._vocab_size)
        made = self._kept[seed, number] = array("I", drawn.astype(np.uint32).tobytes())
        return made
