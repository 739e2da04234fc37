"""What the Ops on torch tensors share: the calls of the KV pool, and the operations that are torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace.backends.torch_kv_pool import KVLayer, KVPool, bytes_per_block
from headrace.types import KVGroupSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What `engine.dtype` may be."""


class TorchOps:
    """Base of CpuOps and GpuOps. `allocate_kv` of the subclass sets `_pool`."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self._kv_dtype = kv_dtype
        self._weight_bytes = 0
        self._pool: KVPool | None = None

    # --- KV storage -------------------------------------------------------------

    @property
    def layers(self) -> dict[int, KVLayer]:
        """The storage by layer; empty before allocate_kv."""
        return {} if self._pool is None else self._pool.layers

    def kv_bytes_per_block(self, groups: Sequence[KVGroupSpec], block_size: int) -> int:
        return bytes_per_block(groups, block_size, self._kv_dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._kv().copy_blocks(pairs)

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._kv().read_rows(layer, slots)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        self._kv().write_rows(layer, slots, keys, values)

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def _kv(self) -> KVPool:
        assert self._pool is not None, "allocate_kv comes before any use of the KV pool"
        return self._pool

    # --- the forward ------------------------------------------------------------

    def embed(self, weight: Any, step: Any, scale: float = 1.0) -> torch.Tensor:
        rows: torch.Tensor = weight.rows.index_select(0, step.token_ids).float()
        return rows if scale == 1.0 else rows.mul_(scale)

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        return torch.split_with_sizes(x, list(sizes), dim=1)

    def take_rows(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        return x.index_select(0, step.sample_rows)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return x.div_(cap).tanh_().mul_(cap)
