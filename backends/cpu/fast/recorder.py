"""Records an architecture's forward as a program: the Ops that compute nothing and write down what to do.

A forward is a straight line, so one call says it all. Results are values with a lifetime; once the end
is known, they share a few buffers. A row that only products read is written as codes alone, by
the operation that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import Arena, address
from headrace.backends.cpu.fast.buffers import Value, assign_buffers
from headrace.backends.cpu.fast.coding_plan import CodingPlan
from headrace.backends.cpu.fast.fusing import (
    Instruction,
    gate_at_once,
    link_products,
    pick_at_the_end,
)
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_coding import BRAIN, CODES, GROUP, row_bytes
from headrace.backends.cpu.fast.kernels_matmul import GATED_BYTES
from headrace.backends.cpu.fast.kernels_tiles import PLAIN
from headrace.backends.cpu.fast.packing import (
    HeldWeight,
    Packer,
    UnsupportedModel,
    round_up,
)
from headrace.interfaces import AttentionSpec
from headrace.types import KVGroupSpec, WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUANTIZING = frozenset({at.NORM, at.SILU, at.GELU, at.TAKE})
"""Operations that can write their result as codes too, or alone."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Columns of a value: the `x` of headrace.interfaces.Ops."""

    value: int
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class HeldVector:
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeldRope:
    """Cosines and sines [max_positions, half] f32."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention of a KV group's layers has in common."""

    head_dim: int
    num_kv_heads: int
    ratio: int
    """Query heads per KV head."""
    window: int
    """Rows a query sees, itself among them; 0: all."""


@dataclass(frozen=True, slots=True)
class Program:
    """What the interpreter takes."""

    operations: NDArray[np.int64]
    buffer_domains: tuple[int, ...]
    buffer_row_bytes: tuple[int, ...]
    logits_buffer: int
    logits_stride: int
    scratch_row: int
    """Bytes of the widest row that an operation may need for itself."""
    attention: Mapping[int, AttentionShape]
    """By KV group."""
    num_barriers: int
    plans: tuple[CodingPlan, ...]
    head: int
    """The product that gives the logits where best tokens are found without (see kernels_pick); else 0."""
    keep: tuple[Any, ...]


class Recorder:
    """Implements what loading and a forward need of headrace.interfaces.Ops; `finish` gives the program."""

    def __init__(self, groups: Sequence[KVGroupSpec], activations: str) -> None:
        """`activations` is EngineSettings.activations: how those are coded which meet integer weights."""
        self._activations = activations
        self._packer = Packer(Arena())
        self._group_of = {layer: index for index, g in enumerate(groups) for layer in g.layers}
        self._head_dims = {layer: group.head_dim for group in groups for layer in group.layers}
        self._instructions: list[Instruction] = []
        self._values: list[Value] = []
        self._quantized: dict[tuple[Activation, int], int] = {}
        """By activation and coding."""
        self._plans: dict[int, CodingPlan] = {}
        """Of values that are CODES."""
        self._keep: list[Any] = []
        self._attention: dict[int, AttentionShape] = {}
        self.weight_bytes = 0

    # --- once, at load ----------------------------------------------------------

    def hold(
        self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None
    ) -> HeldWeight:
        held = self._packer.hold(parts, bias)
        self.weight_bytes += held.num_bytes
        self._keep.append(held)
        return held

    def hold_vector(self, values: NDArray[np.float32]) -> HeldVector:
        held = HeldVector(np.array(values, np.float32))
        self.weight_bytes += held.values.nbytes
        self._keep.append(held)
        return held

    def rope_table(
        self, inverse_frequencies: NDArray[np.float64], scale: float, max_positions: int
    ) -> HeldRope:
        angles = np.arange(max_positions)[:, None] * inverse_frequencies[None, :]
        cosines = (np.cos(angles) * scale).astype(np.float32)
        held = HeldRope(cosines, (np.sin(angles) * scale).astype(np.float32))
        self._keep.append(held)
        return held

    # --- the forward ------------------------------------------------------------

    def embed(self, weight: HeldWeight, step: Any, scale: float = 1.0) -> Activation:
        if len(weight.runs) != 1:
            raise UnsupportedModel("the embedding is stored in parts of different schemes")
        out = self._value(at.TOKENS, weight.in_size)
        run = weight.runs[0]
        fields = {at.SIZE: weight.in_size, at.FORM: run.form, at.POINTER: run.tiles}
        self._emit(at.EMBED, {at.OUT: out}, fields | {at.NUMBER: _bits(scale)})
        return out

    def linear(self, x: Activation, weight: HeldWeight) -> Activation:
        codings = [BRAIN if run.form == PLAIN else CODES for run in weight.runs]
        coded = {coding: self._as_codes(x, coding) for coding in dict.fromkeys(codings)}
        out = self._value(self._values[x.value].domain, weight.out_size)
        for index, run in enumerate(weight.runs):
            target = Activation(out.value, run.first_output, run.num_columns * LANES)
            fields = {
                at.SIZE: weight.in_size // GROUP,
                at.COUNT: run.num_columns,
                at.FORM: run.form,
                at.POINTER: run.tiles,
                at.SECOND_POINTER: weight.bias + 4 * run.first_output if weight.bias else 0,
                at.BARRIER: int(index == len(weight.runs) - 1),
                at.PLAN: self._plan_for(coded[codings[index]], run.form),
            }
            self._emit(at.LINEAR, {at.IN: coded[codings[index]], at.OUT: target}, fields)
        return out

    def rms_norm(
        self, x: Activation, weight: HeldVector, eps: float, num_groups: int = 1
    ) -> Activation:
        return self._norm({at.IN: x}, weight, eps, num_groups)

    def add_rms_norm(
        self, x: Activation, residual: Activation, weight: HeldVector, eps: float
    ) -> tuple[Activation, Activation]:
        return self._norm({at.IN: x, at.AUX: residual}, weight, eps, 1), residual

    def _norm(
        self, operands: dict[int, Activation], weight: HeldVector, eps: float, num_groups: int
    ) -> Activation:
        x = operands[at.IN]
        _check_width(x.width // num_groups, "a norm's run")
        out = self._value(self._values[x.value].domain, x.width)
        fields = {at.SIZE: x.width, at.COUNT: num_groups, at.POINTER: address(weight.values)}
        self._emit(at.NORM, operands | {at.OUT: out}, fields | {at.NUMBER: _bits(eps)})
        return out

    def add(self, x: Activation, residual: Activation) -> Activation:
        _check_width(x.width, "a sum")
        self._emit(at.ADD, {at.IN: x, at.AUX: residual}, {at.SIZE: x.width})
        return residual

    def split(self, x: Activation, sizes: Sequence[int]) -> Sequence[Activation]:
        pieces, column = [], x.column
        for size in sizes:
            pieces.append(Activation(x.value, column, size))
            column += size
        return pieces

    def rope_write_kv(
        self, q: Activation, k: Activation, v: Activation, table: HeldRope, layer: int, step: Any
    ) -> Activation:
        head_dim = self._head_dims[layer]
        fields = {
            at.SIZE: head_dim,
            at.COUNT: q.width // head_dim,
            at.KV_COUNT: k.width // head_dim,
            at.FORM: table.cosines.shape[1],
            at.POINTER: address(table.cosines),
            at.SECOND_POINTER: address(table.sines),
        }
        self._emit(at.ROPE, {at.IN: q, at.AUX: k, at.OUT: v}, fields | self._layer(layer))
        return q

    def paged_attention(
        self, q: Activation, layer: int, spec: AttentionSpec, step: Any
    ) -> Activation:
        _check_width(spec.head_dim, "a head")
        out = self._value(at.TOKENS, q.width)
        shape = AttentionShape(
            spec.head_dim,
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.sliding_window or 0,
        )
        if self._attention.setdefault(self._group_of[layer], shape) != shape:
            raise UnsupportedModel(f"layer {layer}'s attention differs from that of its KV group")
        fields = {
            at.SIZE: spec.head_dim,
            at.COUNT: spec.num_heads,
            at.KV_COUNT: spec.num_kv_heads,
            at.FORM: spec.sliding_window or 0,
            at.NUMBER: _bits(spec.scale),
            at.SECOND_NUMBER: _bits(spec.softcap or 0.0),
        }
        self._emit(at.ATTEND, {at.IN: q, at.OUT: out}, fields | self._layer(layer))
        return out

    def _layer(self, layer: int) -> dict[int, int]:
        return {at.LAYER: layer, at.GROUP_INDEX: self._group_of[layer]}

    def silu_mul(self, x: Activation) -> Activation:
        return self._gate(x, at.SILU)

    def gelu_mul(self, x: Activation) -> Activation:
        return self._gate(x, at.GELU)

    def _gate(self, x: Activation, code: int) -> Activation:
        _check_width(x.width // 2, "a gate")
        out = self._value(self._values[x.value].domain, x.width // 2)
        self._emit(code, {at.IN: x, at.OUT: out}, {at.SIZE: x.width // 2})
        return out

    def take_rows(self, x: Activation, step: Any) -> Activation:
        _check_width(x.width, "a row")
        out = self._value(at.SAMPLES, x.width)
        self._emit(at.TAKE, {at.IN: x, at.OUT: out}, {at.SIZE: x.width})
        return out

    def soft_cap(self, x: Activation, cap: float) -> Activation:
        fields = {at.SIZE: round_up(x.width, LANES), at.NUMBER: _bits(cap)}
        self._emit(at.SOFT_CAP, {at.IN: x}, fields)
        return x

    # --- writing down -----------------------------------------------------------

    def _value(self, domain: int, width: int, stride: int = 0) -> Activation:
        index = len(self._instructions)
        stride = stride or 4 * round_up(width, LANES)
        self._values.append(Value(domain, width, stride, index, index))
        return Activation(len(self._values) - 1, 0, width)

    def _emit(
        self, code: int, operands: Mapping[int, Activation], numbers: Mapping[int, int]
    ) -> None:
        """Append an operation. Its rows are those of what it gives, or else of what it takes."""
        instruction = Instruction.empty(code)
        fields = instruction.fields
        for place, operand in operands.items():
            value = self._values[operand.value]
            fields[place : place + 3] = operand.value, 4 * operand.column, value.stride
            value.last_use = len(self._instructions)
            if place != at.OUT or code == at.ROPE:
                value.is_read = True
        for place, number in numbers.items():
            fields[place] = number
        shaped_by = operands[at.OUT] if at.OUT in operands else operands[at.IN]
        fields[at.DOMAIN] = self._values[shaped_by.value].domain
        changed = {operands[at.AUX].value} if at.AUX in operands else set()
        changed |= {operands[at.IN].value} if code in (at.ROPE, at.SOFT_CAP) else set()
        for index in changed:
            self._values[index].is_changed = True
        for known in [known for known in self._quantized if known[0].value in changed]:
            del self._quantized[known]
        self._instructions.append(instruction)

    def _as_codes(self, x: Activation, coding: int) -> Activation:
        """Return x as codes: by the operation that makes it where that can, or by one of its own."""
        known = self._quantized.get((x, coding))
        groups = x.width // GROUP
        stride = row_bytes(coding, groups)
        if known is not None:
            return Activation(known, 0, x.width)
        value = self._values[x.value]
        coded = self._value(value.domain, x.width, stride)
        maker = self._instructions[value.first_use].fields
        is_whole = (x.column, x.width) == (0, value.width)
        is_free = maker[at.CODE] in QUANTIZING and maker[at.QUANTIZED] < 0
        if is_free and is_whole and not value.is_changed:
            self._values[coded.value].first_use = value.first_use
        else:
            self._emit(at.QUANTIZE, {at.IN: x}, {at.SIZE: x.width})
            maker = self._instructions[-1].fields
        maker[at.QUANTIZED], maker[at.QUANTIZED_STRIDE] = coded.value, stride
        maker[at.CODING] = coding
        if coding == CODES:
            plan = CodingPlan.of(groups, value.domain, self._activations)
            self._plans[coded.value] = plan
            maker[at.PLAN], maker[at.LOUDNESS] = address(plan.groups), address(plan.loudness)
        self._quantized[x, coding] = coded.value
        return coded

    def _plan_for(self, coded: Activation, form: int) -> int:
        """Where the plan of what a weight of a form meets is; 0: it is not CODES."""
        plan = self._plans.get(coded.value)
        if plan is None:
            return 0
        plan.meets(form)
        return address(plan.groups)

    # --- the program ------------------------------------------------------------

    def finish(self, logits: Activation) -> Program:
        """Share buffers between values and return the program that ends with `logits`."""
        self._values[logits.value].last_use = len(self._instructions)
        self._values[logits.value].is_read = True
        widest = 0
        for instruction in self._instructions:
            fields = instruction.fields
            if fields[at.CODE] in QUANTIZING and not self._values[fields[at.OUT]].is_read:
                widest = max(widest, self._values[fields[at.OUT]].stride)
                self._values[fields[at.OUT]].last_use = -1
                fields[at.OUT] = -1
        instructions = gate_at_once(self._instructions, self._values)
        instructions, head, kept = pick_at_the_end(instructions, self._values, logits.value)
        link_products(instructions)
        buffers = assign_buffers(self._values)
        operations = np.array([i.fields for i in instructions], np.int64)
        for place in (at.IN, at.AUX, at.OUT, at.QUANTIZED):
            operations[:, place] = [buffers.of_value.get(v, -1) for v in operations[:, place]]
        return Program(
            operations=np.ascontiguousarray(operations),
            buffer_domains=tuple(buffers.domains),
            buffer_row_bytes=tuple(buffers.row_bytes),
            logits_buffer=buffers.of_value[logits.value],
            logits_stride=self._values[logits.value].stride,
            scratch_row=max(widest, GATED_BYTES),
            attention=self._attention,
            num_barriers=int((operations[:, at.BARRIER] != 0).sum()),
            plans=tuple(self._plans.values()),
            head=head,
            keep=(*self._keep, *kept),
        )


def _bits(number: float) -> int:
    """The bits of a number as f32."""
    return int(np.float32(number).view(np.int32))


def _check_width(width: int, what: str) -> None:
    if width % LANES:
        raise UnsupportedModel(f"{what} is {width} wide, not a multiple of {LANES}")
