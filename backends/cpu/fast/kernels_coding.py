"""How activations are coded for a product with a held weight, in one of two ways.

CODES, for weights of whole numbers: whole numbers too, by group of 32 inputs. Those of a wide group have 15
bits and are kept as two int8 (256 * high + low), or as int16 with AVX2; those of a narrow one have 8, once
loud inputs are made smaller. A plan says what each group is (see coding_plan): 32 bytes, powers of two, that
inputs are divided by before they are coded and their weights' codes multiplied by in turn; bytes that say
whether it is wide and whether one of those is not 1; and 1 over each of those, f32.
A run is a row's group, codes and then their record: scale f32, sum f32 (of codes times those bytes), and what
sums of products begin with where weights' codes are w + 128 (i32): -128 times the sum of the codes, of the
first 16 and of the last 16, and in narrow groups FLOAT_BITS besides. Low bytes of wide groups come behind all
runs.

BRAIN, for weights of bf16: bf16 too, or f32 where the CPU has no fast products of bf16.

Runs lie in the order in which products read them: of ROWS_TOGETHER rows the first group, then the second. One
register has the address of all that a product reads for a group.
"""

from __future__ import annotations

from typing import Any

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.intrinsics import HAS_BRAIN_DOT, I8, LEVEL, routine

GROUP = 32
CODES, BRAIN = range(2)
PLAN_FACTORS, PLAN_WIDE, PLAN_DOUBLES, PLAN_SHARES, PLAN_BYTES = 0, 32, 33, 64, 192
WIDE_IS_SHORT = LEVEL == capability.AVX2
"""Whether wide codes are kept as int16, of inputs 0, 2, 1, 3 of each 4: AVX2 multiplies those as fast."""
BRAIN_IS_FLOAT = not HAS_BRAIN_DOT
"""Whether BRAIN codes are kept as f32: where there are no products of bf16 nothing is won by rounding."""
RUN_BYTES = (96 if WIDE_IS_SHORT else 64, 128 if BRAIN_IS_FLOAT else 64)
"""Of a row's group in each coding, without low bytes."""
ROWS_TOGETHER = 8
RECORD = 64 if WIDE_IS_SHORT else GROUP
"""Where the record is in a run of CODES."""
RECORD_SCALE, RECORD_SUM = RECORD, RECORD + 4
EXCESS, EXCESS_FIRST, EXCESS_LAST = RECORD + 8, RECORD + 12, RECORD + 16
"""Where a run has what sums of products begin with if codes are w + 128."""
FLOAT_BASE, FLOAT_BITS = 12582912.0, 0x4B400000
"""1.5 * 2**23 and its bits as f32. A whole number below 2**22 added to those bits gives the bits of its sum
with it: no conversion is needed, and a fused multiplication takes the base off again."""
_LINE = 64


def row_bytes(coding: int, groups: int) -> int:
    """Bytes of a coded row of so many groups, on average of ROWS_TOGETHER; whole lines, as a run is."""
    low_bytes = RUN_BYTES[CODES] if coding == CODES and not WIDE_IS_SHORT else 0
    return -(-groups * (RUN_BYTES[coding] + low_bytes) // _LINE) * _LINE


def group_bytes(coding: int) -> int:
    """From a run to the same row's next one."""
    return ROWS_TOGETHER * RUN_BYTES[coding]


def low_codes_behind(e: Any, groups: Any) -> Any:
    """How far the low bytes of wide groups are behind the high ones."""
    return e.integer(0) if WIDE_IS_SHORT else e.times(groups, group_bytes(CODES))


@routine("int")
def coded_row(e: Any, rows: Any, row: Any, stride: Any, coding: Any) -> Any:
    """Where the first run of row `row` is. rows: where all are. stride: row_bytes."""
    together = e.integer(ROWS_TOGETHER)
    inside = e.builder.srem(row, together)
    is_coded = e.builder.icmp_signed("==", coding, e.integer(CODES))
    run = e.builder.select(is_coded, *(e.integer(RUN_BYTES[kind]) for kind in (CODES, BRAIN)))
    before = e.builder.mul(e.builder.sub(row, inside), stride)
    return e.add(rows, e.add(before, e.builder.mul(inside, run)))


def is_wide(e: Any, plan: Any) -> Any:
    """Whether the group of activations with this plan is wide, as an i1."""
    return e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_WIDE), I8(0))


def has_doubles(e: Any, plan: Any) -> Any:
    """Whether the group of activations with this plan has inputs made smaller, as an i1."""
    return e.builder.icmp_signed("!=", e.load(plan, I8, PLAN_DOUBLES), I8(0))
