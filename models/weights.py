"""Weights as declarations: which stored tensors make one weight, and how it splits over ranks.

An architecture declares, `WeightLoader` reads: so tensor parallelism is a property of loading. Large
tensors go to the backend in row ranges that are expanded when asked for, so that no full f32 copy exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.interfaces import Group, LoadSettings, Ops, TensorSource
from headrace.models.dequantize import to_float32
from headrace.types import WeightPart

Split = Literal["out", "in", "none"]
PLAIN_SCHEMES = frozenset({"f32", "f16", "bf16"})
MAX_PART_ELEMENTS = 4 << 20
"""An expanded part is at most this large (16 MB in f32), one row at least."""


@dataclass(frozen=True, slots=True)
class LinearDeclaration:
    """Stored matrices [out_i, in] stacked along out into one weight, whole as in the checkpoint."""

    names: tuple[str, ...]
    """Canonical names without their `.weight`."""
    out_sizes: tuple[int, ...]
    in_size: int
    split: Split = "none"
    """Which axis ranks share: "out" each stacked matrix by itself, "in" before an all_reduce."""
    has_bias: bool = False

    @property
    def num_elements(self) -> int:
        return sum(self.out_sizes) * self.in_size


@dataclass(frozen=True, slots=True)
class VectorDeclaration:
    """A stored vector [size], the same on every rank."""

    name: str
    size: int

    @property
    def num_elements(self) -> int:
        return self.size


Declaration = LinearDeclaration | VectorDeclaration


@dataclass(frozen=True, slots=True)
class PartRange:
    """A rectangle of a stored matrix: rows and columns from first to before last."""

    part: WeightPart
    rows: tuple[int, int]
    columns: tuple[int, int]


class LazyParts(Sequence[WeightPart]):
    """Parts that are cut out and expanded when asked for, and forgotten by this object at once."""

    def __init__(
        self, ranges: Sequence[PartRange], expand: Callable[[WeightPart], WeightPart]
    ) -> None:
        self._ranges = ranges
        self._expand = expand

    def __len__(self) -> int:
        return len(self._ranges)

    @overload
    def __getitem__(self, index: int) -> WeightPart: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WeightPart]: ...
    def __getitem__(self, index: int | slice) -> WeightPart | Sequence[WeightPart]:
        if isinstance(index, slice):
            return LazyParts(self._ranges[index], self._expand)
        return cut(self._ranges[index], self._expand)


def cut(piece: PartRange, expand: Callable[[WeightPart], WeightPart]) -> WeightPart:
    """Return the rectangle, a view of what is stored where its scheme allows one."""
    part, (first, last) = piece.part, piece.rows
    num_columns = part.shape[1]
    if piece.rows != (0, part.shape[0]):
        part = replace(part, shape=(last - first, num_columns), data=part.data[first:last])
    if piece.columns == (0, num_columns):
        return expand(part)
    part = part if part.scheme in PLAIN_SCHEMES else expand(part)
    left, right = piece.columns
    return expand(replace(part, shape=(last - first, right - left), data=part.data[:, left:right]))


class WeightLoader:
    """Reads what was declared and gives it to the backend."""

    def __init__(
        self,
        ops: Ops,
        tensors: TensorSource,
        group: Group,
        settings: LoadSettings,
        num_elements: int,
    ) -> None:
        """`num_elements`: of everything that will be held, what `settings.report` counts against."""
        self._ops = ops
        self._tensors = tensors
        self._group = group
        self._settings = settings
        self._num_elements = num_elements
        self._num_held = 0

    def hold(self, declaration: Declaration) -> Any:
        """Return the backend's own form. Raises ModelError naming a tensor that is absent or misshapen."""
        if isinstance(declaration, VectorDeclaration):
            held = self._ops.hold_vector(self._vector(declaration.name, declaration.size))
        else:
            parts = LazyParts(list(self._ranges(declaration)), self._settings.expand)
            held = self._ops.hold(parts, self._bias(declaration))
        self._num_held += declaration.num_elements
        self._settings.report(min(1.0, self._num_held / self._num_elements))
        return held

    def _ranges(self, declaration: LinearDeclaration) -> Iterator[PartRange]:
        """Yield this rank's share of every stacked matrix, large ones in several row ranges."""
        for name, out_size in zip(declaration.names, declaration.out_sizes, strict=True):
            part = self._read(f"{name}.weight", (out_size, declaration.in_size))
            rows, columns = (0, out_size), (0, declaration.in_size)
            if declaration.split == "out":
                rows = self._share(part.name, out_size)
            elif declaration.split == "in":
                columns = self._share(part.name, declaration.in_size)
            stride = rows[1] - rows[0]
            if part.scheme not in self._settings.schemes:
                stride = max(1, MAX_PART_ELEMENTS // declaration.in_size)
            for first in range(*rows, stride):
                yield PartRange(part, (first, min(first + stride, rows[1])), columns)

    def _bias(self, declaration: LinearDeclaration) -> NDArray[np.float32] | None:
        """The stacked bias; with a split of "in" only rank 0 adds it, before the sum over ranks."""
        if not declaration.has_bias or (declaration.split == "in" and self._group.rank > 0):
            return None
        biases = []
        for name, size in zip(declaration.names, declaration.out_sizes, strict=True):
            first, last = 0, size
            if declaration.split == "out":
                first, last = self._share(name, size)
            biases.append(self._vector(f"{name}.bias", size)[first:last])
        return np.concatenate(biases)

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        part = self._read(name, (size,))
        return to_float32(part.scheme, part.data, part.shape, name)

    def _read(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        if not self._tensors.has(name):
            raise ModelError(
                f"the checkpoint has no tensor '{name}' {list(shape)}, which its configuration asks "
                "for; the file is incomplete or of another architecture"
            )
        stored = tuple(self._tensors.scheme(name)[1])
        if stored != shape:
            raise ModelError(
                f"tensor '{name}' is {list(stored)} in the checkpoint, its configuration asks for "
                f"{list(shape)}"
            )
        return self._tensors.read(name)

    def _share(self, name: str, size: int) -> tuple[int, int]:
        ranks = self._group.size
        if size % ranks:
            raise ModelError(
                f"tensor '{name}' has {size} along the axis that {ranks} ranks share, which is not "
                f"a multiple of {ranks}; choose a tensor-parallel size that divides it"
            )
        share = size // ranks
        return self._group.rank * share, (self._group.rank + 1) * share
