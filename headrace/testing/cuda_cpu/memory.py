"""Counts what torch's operations hold, so that host memory can pass for a device's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made while it is entered; more than `limit_bytes` is refused, as on a GPU."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = set()
        if func is not torch.ops.aten.lift_fresh.default:  # what it is given, it has just made
            seen = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _address(tensor) not in seen:
                seen.add(_address(tensor))
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if self.held_bytes + size > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{size} bytes are asked for, {self.held_bytes} of {self.limit_bytes} are held"
            )
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.held_bytes -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
