"""A model with its channels in another order: the same function, in plain numbers that no scheme has rounded.

A file of 4-bit blocks gives 4-bit blocks again without loss. Once its channels are shuffled, a group of 32
holds numbers of many groups, and rounding them costs what it costs a checkpoint that never was quantized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.interfaces import LoadedModel
from headrace.types import WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = "model.layers.0."


def shuffled(model: LoadedModel, seed: int = 0) -> LoadedModel:
    """Return a Llama-like model (`llama`, `qwen2`, `mistral`) with its channels shuffled, stored as f32."""
    return replace(model, tensors=ShuffledTensors(model, seed), stored_dtype="float32")


class ShuffledTensors:
    """Implements headrace.interfaces.TensorSource."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        self._model = model
        self._head_dim = model.architecture.kv_groups()[0].head_dim
        rng = np.random.default_rng(seed)
        _, (inner_size, hidden_size) = model.tensors.scheme(f"{_BLOCK}mlp.gate_proj.weight")
        self._hidden = rng.permutation(hidden_size)
        self._inner = rng.permutation(inner_size)
        self._in_head = rng.permutation(self._head_dim)

    def names(self) -> Iterable[str]:
        return self._model.tensors.names()

    def has(self, name: str) -> bool:
        return self._model.tensors.has(name)

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "f32", self._model.tensors.scheme(name)[1]

    def read(self, name: str) -> WeightPart:
        part = self._model.tensors.read(name)
        values = np.asarray(self._model.expand(part).data, np.float32).reshape(part.shape)
        rows, columns = self._orders(name, values)
        if rows is not None:
            values = values[rows]
        if columns is not None:
            values = values[:, columns]
        return WeightPart(name, "f32", part.shape, np.ascontiguousarray(values))

    def _orders(
        self, name: str, values: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        """The new orders of a tensor's rows (or elements) and columns; None: as they are."""
        if values.ndim == 1:
            return (self._hidden if len(values) == len(self._hidden) else None), None
        if "o_proj" in name:
            return self._hidden, self._heads(values.shape[1])
        if "down_proj" in name:
            return self._hidden, self._inner
        if "v_proj" in name:
            return self._heads(values.shape[0]), self._hidden
        is_inner = "gate_proj" in name or "up_proj" in name
        return (self._inner if is_inner else None), self._hidden

    def _heads(self, size: int) -> NDArray[np.int64]:
        """Every head's elements in the same new order."""
        heads = np.arange(size // self._head_dim)[:, None] * self._head_dim
        return np.asarray((heads + self._in_head).reshape(-1))
