"""Cuts a step's attention into items: few, and even enough that every thread has its share.

How a step is cut changes no result (see kernels_attend), so that the number of threads may decide.
"""

from __future__ import annotations

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.kernels_attend import MAX_VECTORS, SEGMENT_ROWS, stretch_of

PIECES_PER_THREAD = 8
"""An item that takes more than a thread's share divided by this is shared between threads."""


@fast_kernel
def segments_of(kv_len, num_queries, first, count, window):  # type: ignore[no-untyped-def]
    """Return the first segment that some of `count` queries from `first` on see, and the end of them."""
    row = kv_len - num_queries + first
    start = max(0, row + 1 - window) if window > 0 else 0
    return start // SEGMENT_ROWS, (row + count + SEGMENT_ROWS - 1) // SEGMENT_ROWS


@fast_kernel
def _put(items, used, facts, sharers, spans, places):  # type: ignore[no-untyped-def]
    """Append `sharers` items with the same queries; return how many there are now.

    spans: first and end segment, first stretch, how many there are, and of how many segments they are.
    """
    sequence, first, count = facts
    lowest, end, first_stretch, stretches, stretch = spans
    for share in range(sharers):
        if used < len(items):
            item = items[used]
            item[at.SEQUENCE], item[at.FIRST_QUERY], item[at.NUM_QUERIES] = sequence, first, count
            begin = first_stretch + stretches * share // sharers
            stop = first_stretch + stretches * (share + 1) // sharers
            item[at.FIRST_SEGMENT] = max(lowest, begin * stretch)
            item[at.END_SEGMENT] = min(end, stop * stretch)
            item[at.SHARERS], item[at.LOWEST_SEGMENT] = sharers, lowest
            item[at.NUM_STRETCHES] = stretches
            item[at.PARTIAL], item[at.ARRIVAL] = places
        used += 1
    return used


@fast_kernel
def plan_items(query_starts, kv_lens, shape, num_threads, items):  # type: ignore[no-untyped-def]
    """Write the items of one group; return how many there are, bytes of partial sums, lines of arrivals.

    query_starts [S + 1] and kv_lens [S] i4; shape: window, KV heads, heads per KV head, bytes of one vector's
    sums. Where `items` [n, ITEM_FIELDS] is too short only the counts are right.
    """
    window, kv_heads, ratio, bytes_each = shape
    at_once, stretch = max(1, MAX_VECTORS // ratio), stretch_of(kv_heads)
    work = 0
    for sequence in range(len(kv_lens)):
        queries = query_starts[sequence + 1] - query_starts[sequence]
        for first in range(0, queries, at_once):
            count = min(at_once, queries - first)
            lowest, end = segments_of(kv_lens[sequence], queries, first, count, window)
            work += (end - lowest) * count
    share = max(1, work * kv_heads // (num_threads * PIECES_PER_THREAD))
    used, partial, arrival = 0, 0, 0
    for are_prompts in (
        True,
        False,
    ):  # prompts first, their last queries, which see most, before the others
        for sequence in range(len(kv_lens)):
            queries = query_starts[sequence + 1] - query_starts[sequence]
            if queries == 0 or (queries > 1) != are_prompts:
                continue
            for first in range((queries - 1) // at_once * at_once, -1, -at_once):
                count = min(at_once, queries - first)
                lowest, end = segments_of(kv_lens[sequence], queries, first, count, window)
                stretches = (end + stretch - 1) // stretch - lowest // stretch
                sharers = 1
                if num_threads > 1:
                    wanted = ((end - lowest) * count + share - 1) // share
                    sharers = max(1, min(stretches, wanted))
                places = (partial, arrival)
                spans = (lowest, end, lowest // stretch, stretches, stretch)
                used = _put(items, used, (sequence, first, count), sharers, spans, places)
                if sharers > 1:
                    partial += kv_heads * stretches * count * ratio * bytes_each
                    arrival += kv_heads
    return used, partial, arrival
