"""Memory of whole pages for weights, activations and keys: zero, private, huge, addresses known.

Weights share large mappings, since a huge page for the tail of each small one would waste more than it holds.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
MAPPING_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and newer, which the module mmap does not name."""


def map_pages(num_bytes: int, *, huge: bool = True) -> NDArray[np.uint8]:
    """Return zeros, aligned to a huge page, whose pages exist only once they are touched."""
    size = max(num_bytes, 1)
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages get no huge ones
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags)
    if huge and hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    offset = -start % _HUGE_PAGE
    return np.frombuffer(pages, np.uint8, count=size, offset=offset)


def make_resident(array: NDArray[np.uint8]) -> bool:
    """Have an array's pages exist, whatever is in them; False: this system cannot be asked for that."""
    if sys.platform != "linux":
        return False
    start = address(array) // mmap.PAGESIZE * mmap.PAGESIZE
    size = address(array) + array.nbytes - start
    advise = ctypes.CDLL(None).madvise
    return bool(advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)


class Arena:
    """Hands out aligned pieces of large mappings. Mutable; pieces live as long as it does."""

    def __init__(self) -> None:
        self._mappings: list[NDArray[np.uint8]] = []
        self._used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros [num_bytes]."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not self._mappings or self._used + size > len(self._mappings[-1]):
            self._mappings.append(map_pages(max(size, MAPPING_BYTES)))
            self._used = 0
        piece = self._mappings[-1][self._used : self._used + num_bytes]
        self._used += size
        return piece


def address(array: NDArray[np.generic]) -> int:
    """Return where an array's first element is."""
    return int(array.ctypes.data)
