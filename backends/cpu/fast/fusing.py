"""What becomes of a recorded program once its end is known: which operations are done at once with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.buffers import Value
from headrace.backends.cpu.fast.coding_plan import CodingPlan
from headrace.backends.cpu.fast.intrinsics import LANES, LEVEL
from headrace.backends.cpu.fast.kernels_coding import CODES, GROUP
from headrace.backends.cpu.fast.kernels_matmul import TOPS_BYTES
from headrace.backends.cpu.fast.kernels_tiles import BYTES_SIGNED

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Instruction:
    """An operation; `fields` is mutable: IN, AUX, OUT and QUANTIZED are values until the end."""

    fields: list[int]

    @classmethod
    def empty(cls, code: int) -> Instruction:
        fields = [0] * at.NUM_FIELDS
        fields[at.CODE], fields[at.BARRIER] = code, 1
        for place in (at.IN, at.AUX, at.OUT, at.QUANTIZED):
            fields[place] = -1
        return cls(fields)


def link_products(instructions: Sequence[Instruction]) -> None:
    """Tell what computes long which product follows, whose weights it can ask for at its end."""
    before = None
    for index, instruction in enumerate(instructions):
        code = instruction.fields[at.CODE]
        if code == at.LINEAR and before is not None:
            before.fields[at.NEXT] = index
        if code in (at.LINEAR, at.ATTEND):
            before = instruction


def gate_at_once(instructions: Sequence[Instruction], values: Sequence[Value]) -> list[Instruction]:
    """Put a gate whose result only products read into the product before it, where that is one."""
    kept: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        gate, before = instruction.fields, kept[-1].fields if kept else []
        is_gate = gate[at.CODE] in (at.SILU, at.GELU) and gate[at.OUT] < 0 <= gate[at.QUANTIZED]
        value = values[gate[at.IN]]
        if not (is_gate and value.last_use == index and _is_all_of(before, gate, value)):
            kept.append(instruction)
            continue
        before[at.GATE], before[at.GATE_PLAN] = gate[at.CODE], gate[at.PLAN]
        for place in (at.QUANTIZED, at.QUANTIZED_STRIDE, at.CODING, at.LOUDNESS):
            before[place] = gate[place]
        values[gate[at.QUANTIZED]].first_use = index - 1
        value.last_use = before[at.OUT] = -1
    return kept


def _is_all_of(product: list[int], gate: list[int], value: Value) -> bool:
    """Whether the operation before a gate is a product that gives all that it reads, in whole groups."""
    return (
        (product[at.CODE], product[at.OUT]) == (at.LINEAR, gate[at.IN])
        and product[at.COUNT] * LANES == value.width == 2 * gate[at.SIZE]
        and gate[at.SIZE] % GROUP == 0
    )


def pick_at_the_end(
    instructions: list[Instruction], values: list[Value], logits: int
) -> tuple[list[Instruction], int, tuple[NDArray[np.generic], ...]]:
    """Let best tokens be found without logits, if one product gives those, of weights in bytes, without bias.

    Return the instructions, the index of that product, 0 where it is not so, and what must be kept.
    """
    head, end = instructions[-1].fields, max(value.last_use for value in values)
    is_all = head[at.CODE] == at.LINEAR and head[at.OUT] == logits and head[at.OUT_OFFSET] == 0
    is_all &= head[at.COUNT] * LANES >= values[logits].width and head[at.DOMAIN] == at.SAMPLES
    is_all &= head[at.SECOND_POINTER] == 0  # sums begin with a bias, and round at its size
    if LEVEL != capability.AVX512_VNNI or not is_all or head[at.FORM] != BYTES_SIGNED:
        return instructions, 0, ()
    from headrace.backends.cpu.fast.kernels_pick import group_norms

    groups, columns, coded = head[at.SIZE], head[at.COUNT], head[at.IN]
    norms = np.zeros(groups, np.float32)
    group_norms(head[at.POINTER], columns, groups, norms)
    if not np.isfinite(norms).all():
        return instructions, 0, ()
    narrow, born = CodingPlan.of(groups, at.SAMPLES, "int8"), values[logits].first_use
    values[coded].last_use = end
    stride = values[coded].stride
    values.append(Value(at.SAMPLES, values[coded].width, stride, born, end))
    values.append(Value(at.SAMPLES, columns, columns * TOPS_BYTES // 8, born, end))
    rough, tops = len(values) - 2, len(values) - 1
    before, behind = Instruction.empty(at.ROUGH), Instruction.empty(at.PICK)
    for fields, source, target in ((before.fields, coded, rough), (behind.fields, coded, logits)):
        fields[at.DOMAIN], fields[at.SIZE], fields[at.PLAN] = at.SAMPLES, groups, head[at.PLAN]
        fields[at.IN], fields[at.IN_STRIDE] = source, stride
        fields[at.OUT], fields[at.OUT_STRIDE] = target, stride
    behind.fields[at.SIZE], behind.fields[at.POINTER] = values[logits].width, address(norms)
    behind.fields[at.OUT_STRIDE] = values[logits].stride
    for fields in (head, behind.fields):
        fields[at.AUX], fields[at.AUX_STRIDE] = tops, values[tops].stride
    head[at.GATE], head[at.GATE_PLAN] = at.PICK, address(narrow.groups)
    head[at.QUANTIZED], head[at.QUANTIZED_STRIDE], head[at.CODING] = rough, stride, CODES
    head[at.SECOND_NUMBER] = values[logits].width
    return (
        [*instructions[:-1], before, instructions[-1], behind],
        len(instructions),
        (norms, narrow.groups),
    )
