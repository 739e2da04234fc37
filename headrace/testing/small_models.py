"""A model that is a few operations on given tensors: compares one operation of a backend with the oracle's.

Its input is the embedding, one row per token id; its result is what the forward returns at the sample
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.interfaces import Group, LoadedModel, LoadSettings, Ops, TextAssets
from headrace.models.dequantize import expand
from headrace.types import KVGroupSpec, WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

Load = Callable[[Ops, Mapping[str, WeightPart], LoadSettings], Any]
Forward = Callable[[Ops, Any, Any], Any]


class SmallArchitecture:
    """Implements headrace.interfaces.ModelArchitecture."""

    name: ClassVar[str] = "small"

    def __init__(self, load: Load, forward: Forward, groups: Sequence[KVGroupSpec]) -> None:
        self._load = load
        self._forward = forward
        self._groups = groups
        self.vocab_size = 1
        self.max_position = 4096

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return self._groups

    def query_heads(self) -> int:
        return 1

    def load(self, ops: Ops, tensors: Any, group: Group, settings: LoadSettings) -> Any:
        parts = {name: settings.expand(tensors.read(name)) for name in tensors.names()}
        return self._load(ops, parts, settings)

    def forward(self, ops: Ops, group: Group, weights: Any, step: Any) -> Any:
        return self._forward(ops, weights, step)


class PartSource:
    """Implements headrace.interfaces.TensorSource on parts in memory."""

    def __init__(self, parts: Mapping[str, WeightPart]) -> None:
        self._parts = parts

    def names(self) -> Iterable[str]:
        return self._parts

    def has(self, name: str) -> bool:
        return name in self._parts

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._parts[name].scheme, self._parts[name].shape

    def read(self, name: str) -> WeightPart:
        return self._parts[name]


def small_model(
    parts: Mapping[str, WeightPart],
    load: Load,
    forward: Forward,
    *,
    width: int,
    groups: Sequence[KVGroupSpec] = (),
) -> LoadedModel:
    """Return the model; `width` is that of the forward's result."""
    architecture = SmallArchitecture(load, forward, groups)
    architecture.vocab_size = width
    return LoadedModel(
        name="small",
        revision="0",
        architecture=architecture,
        tensors=PartSource(parts),
        text=TextAssets("", None, {}, False, ()),
        default_sampling={},
        stored_dtype="bfloat16",
        expand=expand,
    )


def plain_part(name: str, rows: NDArray[np.floating]) -> WeightPart:
    """Return rows as an f32 part."""
    values = np.ascontiguousarray(rows, np.float32)
    return WeightPart(name, "f32", values.shape, values)


def bf16_exact(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the values cut to what bf16 can hold."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)
