"""Weights as they are held, in tiles of 16 outputs x 32 inputs, and how a product reads them.

Lane i of a vector is output i; a 32-bit lane of codes holds 4 consecutive inputs. Tiles of the same outputs, a
column, lie one after the other along the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import F32, I32, LANES, LEVEL, SHORTS16
from headrace.backends.cpu.fast.kernels_coding import (
    FLOAT_BASE,
    PLAN_BYTES,
    PLAN_FACTORS,
    WIDE_IS_SHORT,
    has_doubles,
)

NIBBLES = 0
"""256 bytes: byte j of a 64-byte run holds inputs j % 4 of two quads; 16 scales f16, 16 minima f16."""
BYTES_SIGNED = 1
"""512 bytes of w + 128; 16 scales f16."""
BYTES_WITH_MINIMUM = 2
"""512 bytes of 0 .. 31; 16 scales f16, 16 minima f16."""
BYTES_IN_HALVES = 3
"""512 bytes of w + 128; 16 scales f16 for the first 16 inputs, 16 for the last."""
PLAIN = 4
"""1,024 bytes: 16 runs of 16 pairs of bf16, two consecutive inputs of an output in a pair."""

TILE_BYTES = (320, 544, 576, 576, 1024)
FORMS_WITH_ROOM = (NIBBLES, BYTES_WITH_MINIMUM) if LEVEL == capability.AVX512_VNNI else ()
"""Those whose codes can be doubled three times and are still bytes; with AVX2 their sums would not fit then."""
OUTPUTS_AT_ONCE = 8 if LEVEL == capability.AVX2 else LANES
"""Outputs of a tile that are computed together: what a register holds."""
RESULTS, INTEGERS = (ir.VectorType(kind, OUTPUTS_AT_ONCE) for kind in (F32, I32))
UNPACKED_GROUPS = 24
"""Of a column at a time, so that they stay in the first-level cache."""
UNPACKED_BYTES = 512 + 3 * 4 * LANES
"""8 vectors of codes; scales, minima and bases as f32."""


def _codes(e: Any, tile: Any, form: int, is_wide: bool) -> list[Any]:
    """Return the inputs of a tile's outputs: 8 vectors of 4 bytes a lane, 16 of 2 shorts if WIDE_IS_SHORT."""
    is_short = is_wide and WIDE_IS_SHORT
    kind = SHORTS16 if is_short else INTEGERS
    runs = [e.load(tile, kind, 64 * run) for run in range(4 if form == NIBBLES else 8)]
    if is_short:
        shifts, mask = ((0, 8, 4, 12), 15) if form == NIBBLES else ((0, 8), 255)
        shifted = [e.builder.lshr(run, e.fill(shift, kind)) for run in runs for shift in shifts]
        return [e.builder.and_(code, e.fill(mask, kind)) for code in shifted]
    if form != NIBBLES:
        return runs
    mask = e.fill(0x0F0F0F0F, kind)
    return [code for run in runs for code in (e.builder.and_(run, mask), e.high_nibbles(run))]


def _doubled(e: Any, codes: Sequence[Any], plan: Any) -> list[Any]:
    """Return codes times their bytes of a plan; in every second group there are none to double."""
    slots = [e.variable(code) for code in codes]
    with e.builder.if_then(has_doubles(e, plan)):
        for number, slot in enumerate(slots):
            factors = e.broadcast(e.load(plan, I32, PLAN_FACTORS + 4 * number))
            e.set(slot, e.times_powers(e.get(slot), factors))
    return [e.get(slot) for slot in slots]


class Packed:
    """A column of tiles as they are held, for `_rows`."""

    def __init__(self, e: Any, form: int, at: dict[str, Any]) -> None:
        self._e, self._form, self._at = e, form, at
        self.first, self.count = e.integer(0), at["groups"]

    def start(self, side: Any, out: Any) -> Any:
        """Return what the results of a row begin with, which are to be at `out`."""
        e = self._e
        slot = e.variable(e.fill(0.0, RESULTS))
        is_biased = e.builder.icmp_signed("!=", self._at["bias"], e.integer(0))
        with e.builder.if_then(is_biased):
            e.set(slot, e.load(e.add(self._at["bias"], e.times(side, 4)), RESULTS))
        return e.get(slot)

    def _tile(self, group: Any) -> Any:
        return self._e.add(self._at["tiles"], self._e.times(group, TILE_BYTES[self._form]))

    def scales(self, group: Any, side: Any) -> dict[str, list[Any]]:
        """Return a tile's scales, and the second ones or its minima where there are some; and their bases.

        A base is what a scale leaves of FLOAT_BASE to be taken off.
        """
        e, end = self._e, 256 if self._form == NIBBLES else 512
        place = e.add(self._tile(group), e.add(e.times(side, 2), end))
        count = 1 if self._form == BYTES_SIGNED else 2
        scales = [e.load_halves(place, 32 * number, OUTPUTS_AT_ONCE) for number in range(count)]
        off = e.fill(-FLOAT_BASE, RESULTS)
        num_bases = 2 if self._form == BYTES_IN_HALVES else 1
        return {"scales": scales, "bases": [e.builder.fmul(s, off) for s in scales[:num_bases]]}

    def codes(self, group: Any, side: Any, plan: Any, is_wide: bool) -> list[Any]:
        e = self._e
        tile = e.add(self._tile(group), e.times(side, 4))
        codes = _codes(e, tile, self._form, is_wide)
        return _doubled(e, codes, plan) if self._form in FORMS_WITH_ROOM and not is_wide else codes


class Unpacked:
    """Tiles of NIBBLES from group `first` on as bytes, doubled, their scales and minima as f32."""

    def __init__(self, e: Any, at: dict[str, Any], space: Any, first: Any, count: Any) -> None:
        self._e, self._space = e, space
        self.first, self.count = first, count
        self._held = held = Packed(e, NIBBLES, at)
        with e.loop(count) as loop:
            group = e.add(first, loop.index)
            target = self._target(group)
            plan = e.add(at["plan"], e.times(group, PLAN_BYTES))
            values = held.codes(group, e.integer(0), plan, is_wide=False)
            scales = held.scales(group, e.integer(0))
            for place, value in enumerate(values + scales["scales"] + scales["bases"]):
                e.store(value, target, 64 * place)

    def _target(self, group: Any) -> Any:
        inside = self._e.builder.sub(group, self.first)
        return self._e.add(self._space, self._e.times(inside, UNPACKED_BYTES))

    def start(self, side: Any, out: Any) -> Any:
        """Return what a row's results were behind the groups before."""
        slot = self._e.variable(self._held.start(side, out))
        is_later = self._e.builder.icmp_signed("!=", self.first, self._e.integer(0))
        with self._e.builder.if_then(is_later):
            self._e.set(slot, self._e.load(out))
        return self._e.get(slot)

    def scales(self, group: Any, side: Any) -> dict[str, list[Any]]:
        values = [self._e.load(self._target(group), offset=512 + 64 * n) for n in range(3)]
        return {"scales": values[:2], "bases": values[2:]}

    def codes(self, group: Any, side: Any, plan: Any, is_wide: bool) -> list[Any]:
        target = self._target(group)
        return [self._e.load(target, INTEGERS, 64 * place) for place in range(8)]
