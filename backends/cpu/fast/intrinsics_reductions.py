"""What is found of several vectors at once, by transposing while they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.backends.cpu.fast.intrinsics import LANES

Combine = Callable[[Any, Any, Any], Any]
_BLOCKS = tuple(range(0, LANES, 4))
"""The first lane of each 4, which shuffles of 128 bits keep together."""


def larger_bits(e: Any, x: Any, y: Any) -> Any:
    """The larger of i32."""
    return e.builder.select(e.builder.icmp_signed("<", x, y), y, x)


def larger_unsigned(e: Any, x: Any, y: Any) -> Any:
    """The larger of i32 without a sign."""
    return e.builder.select(e.builder.icmp_unsigned("<", x, y), y, x)


def larger_float(e: Any, x: Any, y: Any) -> Any:
    """The larger of f32; y where one is NaN."""
    return e.builder.select(e.builder.fcmp_ordered(">", x, y), x, y)


def sum_float(e: Any, x: Any, y: Any) -> Any:
    return e.builder.fadd(x, y)


def sum_int(e: Any, x: Any, y: Any) -> Any:
    return e.builder.add(x, y)


def by_four(e: Any, vectors: Sequence[Any], combine: Combine) -> Any:
    """Combine the lanes of every 128 bits: lane 4 * b + v of the result is of lanes 4 * b .. 4 * b + 3 of v."""

    def halves(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        parts = [
            e.pick(x, y, [b + lane for b in _BLOCKS for lane in lanes]) for lanes in (low, high)
        ]
        return combine(e, *parts)

    a, b, c, d = vectors
    other = LANES
    even, odd = (0, other, 1, other + 1), (2, other + 2, 3, other + 3)
    first, last = (0, 1, other, other + 1), (2, 3, other + 2, other + 3)
    return halves(halves(a, b, even, odd), halves(c, d, even, odd), first, last)


def of_four(e: Any, vectors: Sequence[Any], combine: Combine) -> Any:
    """All lanes of each of 4 vectors of 16, side by side, in one order whichever vector it is."""
    found = by_four(e, vectors, combine)
    for half in (LANES // 2, LANES // 4):
        found = combine(
            e, *(e.pick(found, found, range(first, first + half)) for first in (0, half))
        )
    return found


def largest_of_eight(e: Any, vectors: Sequence[Any], larger: Combine = larger_bits) -> Any:
    """The largest lane of each of 8 vectors of 16, side by side."""
    low, high = (by_four(e, vectors[first : first + 4], larger) for first in (0, 4))
    half = LANES // 2
    pair = larger(e, *(e.pick(low, high, runs(f, f + LANES, half)) for f in (0, half)))
    return larger(e, *(e.pick(pair, pair, runs(f, f + half, 4)) for f in (0, 4)))


def runs(first: int, second: int, count: int) -> list[int]:
    """Two runs of lanes."""
    return [*range(first, first + count), *range(second, second + count)]
