"""Holds linear weights as tiles, one copy each, made tile by tile from what the checkpoint maps.

Rows of parts with the same form follow each other in one run of tiles; a change of form starts a new run,
which must then begin at a whole tile. Q4_K's codes are nibbles like Q4_1's, Q5 and Q6 are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast import kernels_packing as packing
from headrace.backends.cpu.fast.arena import Arena, address
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_coding import GROUP
from headrace.backends.cpu.fast.kernels_tiles import (
    BYTES_IN_HALVES,
    BYTES_SIGNED,
    BYTES_WITH_MINIMUM,
    NIBBLES,
    PLAIN,
    TILE_BYTES,
)
from headrace.types import WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMS: Mapping[str, tuple[int, int]] = {
    "q4_0": (packing.Q4_0, NIBBLES),
    "q4_1": (packing.Q4_1, NIBBLES),
    "q4_k": (packing.Q4_K, NIBBLES),
    "q5_0": (packing.Q5_0, BYTES_SIGNED),
    "q8_0": (packing.Q8_0, BYTES_SIGNED),
    "q5_1": (packing.Q5_1, BYTES_WITH_MINIMUM),
    "q5_k": (packing.Q5_K, BYTES_WITH_MINIMUM),
    "q6_k": (packing.Q6_K, BYTES_IN_HALVES),
    "f32": (packing.F32, PLAIN),
    "f16": (packing.F16, PLAIN),
    "bf16": (packing.BF16, PLAIN),
}
"""Scheme -> its number in kernels_packing and the form of its tiles."""
SCHEMES = frozenset(FORMS)


class UnsupportedModel(Exception):
    """The fast path cannot run this model; the message says why."""


@dataclass(frozen=True, slots=True)
class TileRun:
    """Columns of tiles of one form."""

    form: int
    tiles: int
    """Address of the first."""
    num_columns: int
    """Of 16 outputs each."""
    first_output: int


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A linear weight [out_size, in_size]."""

    runs: tuple[TileRun, ...]
    out_size: int
    in_size: int
    bias: int
    """Address of f32 [out_size rounded up], 0: none."""
    num_bytes: int
    pieces: tuple[NDArray[np.uint8], ...]
    """What the addresses point into, kept alive."""


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Packer:
    """Makes HeldWeights in an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def hold(
        self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None
    ) -> HeldWeight:
        """UnsupportedModel where sizes do not fit tiles."""
        gathered = [parts[index] for index in range(len(parts))]
        in_size = gathered[0].shape[1]
        if in_size % GROUP:
            raise UnsupportedModel(
                f"tensor '{gathered[0].name}' has {in_size} inputs, not a multiple of {GROUP}"
            )
        runs: list[TileRun] = []
        pieces: list[NDArray[np.uint8]] = []
        first = 0
        for form, members in _by_form(gathered):
            out_size = sum(part.shape[0] for part in members)
            if first % LANES:
                raise UnsupportedModel(
                    f"tensor '{members[0].name}' begins at output {first}, not a multiple of {LANES}"
                )
            columns = -(-out_size // LANES)
            piece = self._arena.take(columns * (in_size // GROUP) * TILE_BYTES[form])
            _pack(members, form, in_size // GROUP, address(piece))
            runs.append(TileRun(form, address(piece), columns, first))
            pieces.append(piece)
            first += out_size
        bias_at = 0
        if bias is not None:
            held = self._arena.take(round_up(first, LANES) * 4)
            held.view(np.float32)[: len(bias)] = bias
            pieces.append(held)
            bias_at = address(held)
        num_bytes = sum(piece.nbytes for piece in pieces)
        return HeldWeight(tuple(runs), first, in_size, bias_at, num_bytes, tuple(pieces))


def _by_form(parts: Sequence[WeightPart]) -> list[tuple[int, list[WeightPart]]]:
    """Group neighbours of the same form."""
    grouped: list[tuple[int, list[WeightPart]]] = []
    for part in parts:
        form = FORMS[part.scheme][1]
        if grouped and grouped[-1][0] == form:
            grouped[-1][1].append(part)
        else:
            grouped.append((form, [part]))
    return grouped


def _pack(parts: Sequence[WeightPart], form: int, groups: int, tiles: int) -> None:
    first = 0
    for part in parts:
        data = part.data if part.data.flags.c_contiguous else np.ascontiguousarray(part.data)
        scheme = FORMS[part.scheme][0]
        num_rows = part.shape[0]
        row_bytes = data.nbytes // num_rows
        if form == PLAIN:
            packing.pack_plain(scheme, address(data), row_bytes, num_rows, groups, first, tiles)
        else:
            packing.pack_blocks(
                scheme, address(data), row_bytes, num_rows, groups, first, tiles, form
            )
        first += num_rows
