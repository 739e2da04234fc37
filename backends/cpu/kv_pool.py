"""The KV pool: one mapping of zero pages per layer and plane, resident only where it was written.

A plane is a torch tensor (bf16 needs one), a kernel gets its address.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.errors import ConfigError
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class KVLayer:
    """One layer's storage. Mutable: `bias` is set by whoever compacts."""

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # the same
    group: int
    bias: torch.Tensor | None = None  # [num_blocks, block_size, num_kv_heads] f32

    def planes(self) -> list[torch.Tensor]:
        return [self.keys, self.values, *([] if self.bias is None else [self.bias])]


def kv_dtype_of(name: str) -> torch.dtype:
    """Return the storage type. ConfigError where this backend has none of that name."""
    if name not in DTYPES:
        raise ConfigError(
            f"the reference path of backend 'cpu' stores keys and values in {', '.join(DTYPES)}; "
            f"kv_dtype is {name!r}; write kv_dtype: auto"
        )
    return DTYPES[name]


def bytes_per_block(groups: Sequence[KVGroupSpec], block_size: int, dtype: torch.dtype) -> int:
    elements = sum(len(g.layers) * g.num_kv_heads * g.head_dim for g in groups)
    return 2 * block_size * elements * dtype.itemsize


def zero_plane(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages exist only once they are written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages get no huge ones
    pages = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


class KVPool:
    """All layers of one model."""

    def __init__(
        self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.layers: dict[int, KVLayer] = {}
        for index, group in enumerate(groups):
            if group.head_dim % 16:
                raise ConfigError(
                    f"backend 'cpu' supports head_dim 64, 80, 96, 128, 256 and other multiples of 16; "
                    f"KV group '{group.name}' has {group.head_dim}"
                )
            shape = (num_blocks, block_size, group.num_kv_heads, group.head_dim)
            for layer in group.layers:
                self.layers[layer] = KVLayer(
                    zero_plane(shape, dtype), zero_plane(shape, dtype), index
                )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for layer in self.layers.values():
            for plane in layer.planes():
                for source, target in pairs:
                    plane[target].copy_(plane[source])

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        chosen = torch.tensor(list(slots), dtype=torch.int64)
        kv = self.layers[layer]
        return (
            kv.keys.flatten(0, 1)[chosen].float().numpy(),
            kv.values.flatten(0, 1)[chosen].float().numpy(),
        )

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        chosen = torch.tensor(list(slots), dtype=torch.int64)
        kv = self.layers[layer]
        for plane, rows in ((kv.keys, keys), (kv.values, values)):
            plane.flatten(0, 1)[chosen] = torch.tensor(rows).to(plane.dtype)
