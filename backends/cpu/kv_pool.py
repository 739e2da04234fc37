"""Where the reference path keeps keys and values: one mapping of zero pages per layer and plane.

Pages are resident only where they were written. A plane is a torch tensor (bf16 needs one), a kernel gets its
address.
"""

from __future__ import annotations

import math
import mmap

import torch


def zero_plane(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages exist only once they are written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages get no huge ones
    pages = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)
