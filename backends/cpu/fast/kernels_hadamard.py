"""The Hadamard transform of queries and keys, which keys of 8 bits are kept in.

A key's row has one scale, and in most heads two or three of its numbers are several times as large as the
others, whatever the text. The transform H makes every number a sum of all, with signs: rows become even, and a
score stays what it was, since (H q) (H k) = n q k for runs of n numbers (QuaRot, Ashkboos et al. 2024; Hadamard
in Sylvester's order, not normalized, so that a power of two is all that comes off).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import FLOATS, LANES, routine
from headrace.backends.cpu.fast.kernels_attend_rows import by_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VECTOR = 4 * LANES
MAX_TOGETHER = 8
"""Vectors of a run that are transformed in registers."""


def hadamard_run(head_dim: int) -> int:
    """How many numbers are transformed together: the largest power of two that divides a head."""
    return head_dim & -head_dim


run_of = fast_kernel(hadamard_run)


@routine()
def _mix(e: Any, x: Any, size: Any, together: Any) -> None:
    """The transform of every `together` vectors of 16 numbers, in registers."""

    def body(known: int) -> None:
        with e.loop(e.builder.sdiv(size, e.integer(LANES * known))) as loop:
            place = e.add(x, e.times(loop.index, _VECTOR * known))
            values = [_mixed_lanes(e, e.load(place, offset=_VECTOR * i)) for i in range(known)]
            step = 1
            while step < known:
                for low in [i for i in range(known) if not i & step]:
                    pair = values[low], values[low + step]
                    values[low], values[low + step] = e.builder.fadd(*pair), e.builder.fsub(*pair)
                step *= 2
            for i, value in enumerate(values):
                e.store(value, place, _VECTOR * i)

    by_count(e, together, [1 << i for i in range(MAX_TOGETHER.bit_length())], body)


def _mixed_lanes(e: Any, value: Any) -> Any:
    for step in (1, 2, 4, 8):
        signs = ir.Constant(FLOATS, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        other = e.pick(value, value, [lane ^ step for lane in range(LANES)])
        value = e.fma(value, signs, other)
    return value


@routine()
def _mix_runs(e: Any, x: Any, step: Any) -> None:
    """Sums and differences of x[i] and x[i + step], i < step."""
    with e.loop(e.builder.sdiv(step, e.integer(LANES))) as loop:
        first = e.add(x, e.times(loop.index, _VECTOR))
        second = e.add(first, e.times(step, 4))
        low, high = e.load(first), e.load(second)
        e.store(e.builder.fadd(low, high), first)
        e.store(e.builder.fsub(low, high), second)


@fast_kernel
def hadamard_row(x, size, head_dim):  # type: ignore[no-untyped-def]
    """Transform a row of heads, f32 [size], in place; head_dim: a multiple of 16."""
    run = run_of(head_dim)
    together = min(run // LANES, MAX_TOGETHER)
    _mix(x, size, together)
    step = LANES * together
    while step < run:
        for first in range(0, size, 2 * step):
            _mix_runs(x + 4 * first, step)
        step *= 2


def hadamard_rows(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Transform rows [..., head_dim] in double precision."""
    run = hadamard_run(rows.shape[-1])
    matrix = np.ones((1, 1))
    while len(matrix) < run:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    runs = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, run)
    with np.errstate(invalid="ignore"):  # a broken row is broken throughout
        return np.asarray((runs @ matrix).reshape(rows.shape))
