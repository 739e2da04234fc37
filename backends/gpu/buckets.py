"""Batch sizes for which a decode step is captured as a CUDA graph."""

from __future__ import annotations


def bucket_of(num_sequences: int, max_num_sequences: int) -> int | None:
    """Return the number of sequences that a step of `num_sequences` decodes is filled up to; None: too many.

    1, 2, 4, 8, then multiples of 8: at most 7 rows are wasted, and 64 sequences need 11 graphs.
    """
    if num_sequences > max_num_sequences:
        return None
    if num_sequences > 8:
        return min(-(-num_sequences // 8) * 8, max_num_sequences)
    return min(1 << max(0, num_sequences - 1).bit_length(), max_num_sequences)


def buckets(max_num_sequences: int) -> list[int]:
    """Return every bucket, smallest first."""
    found = (bucket_of(count, max_num_sequences) for count in range(1, max_num_sequences + 1))
    return sorted({bucket for bucket in found if bucket is not None})
