"""How activations are coded for a product with a held weight, in one of two ways.

CODES, for weights of whole numbers: whole numbers too, by group of 32 inputs. Those of a wide group have 15
bits and are kept as two int8 (256 * high + low), or as int16 with AVX2; those of a narrow one have 8, once
loud inputs are made smaller. A plan says what each group is (see coding_plan): 32 bytes, powers of two, that
inputs are divided by before they are coded and their weights' codes multiplied by in turn, and bytes that say
whether it is wide and whether one of those is not 1.
A row is a run per group, codes and then their record: scale f32, scale * sum f32 (of codes times those bytes),
and -128 times the sum of the codes, of the first 16 and of the last 16 (i32). One register holds the address of
a row's run, and all that is read of it lies near. Low bytes of wide groups come behind all runs.

BRAIN, for weights of bf16: bf16 too, or f32 where the CPU has no fast products of bf16.
"""

from __future__ import annotations

from typing import Any

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import HAS_BRAIN_DOT, I8, LEVEL

GROUP = 32
CODES, BRAIN = range(2)
PLAN_FACTORS, PLAN_WIDE, PLAN_DOUBLES, PLAN_BYTES = 0, 32, 33, 64
WIDE_IS_SHORT = LEVEL == capability.AVX2
"""Whether wide codes are kept as int16, of inputs 0, 2, 1, 3 of each 4: AVX2 multiplies those as fast."""
BRAIN_IS_FLOAT = not HAS_BRAIN_DOT
"""Whether BRAIN codes are kept as f32: where there are no products of bf16 nothing is won by rounding."""
RUN_BYTES = (96 if WIDE_IS_SHORT else 64, 128 if BRAIN_IS_FLOAT else 64)
"""Of a group of activations in each coding, without low bytes."""
RECORD = 64 if WIDE_IS_SHORT else GROUP
"""Where the record is in a run of CODES."""
RECORD_SCALE, RECORD_SUM = RECORD, RECORD + 4
EXCESS, EXCESS_FIRST, EXCESS_LAST = RECORD + 8, RECORD + 12, RECORD + 16
"""Where a run has what dot products of codes w + 128 are too large by."""
_LINE = 64


def row_bytes(coding: int, groups: int) -> int:
    """Bytes of a coded row of so many groups: whole lines, so that a run lies in one."""
    low_bytes = GROUP if coding == CODES and not WIDE_IS_SHORT else 0
    return -(-groups * (RUN_BYTES[coding] + low_bytes) // _LINE) * _LINE


def low_codes_behind(e: Any, groups: Any, group: Any) -> Any:
    """How far a group's low bytes are behind its run."""
    if WIDE_IS_SHORT:
        return e.integer(0)
    back = e.times(group, RUN_BYTES[CODES] - GROUP)
    return e.builder.sub(e.times(groups, RUN_BYTES[CODES]), back)


def is_wide(e: Any, plan: Any) -> Any:
    """Whether the group of activations with this plan is wide, as an i1."""
    return e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_WIDE), I8(0))


def has_doubles(e: Any, plan: Any) -> Any:
    """Whether the group of activations with this plan has inputs made smaller, as an i1."""
    return e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_DOUBLES), I8(0))
