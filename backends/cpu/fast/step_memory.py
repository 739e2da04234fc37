"""What one step needs in memory: parameters for the interpreter, activations, the plan of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address, map_pages
from headrace.backends.cpu.fast.kernels_attend import scratch_bytes, sum_bytes
from headrace.backends.cpu.fast.kernels_attend_plan import plan_items
from headrace.backends.cpu.fast.kernels_coding import ROWS_TOGETHER
from headrace.backends.cpu.fast.kernels_matmul import ARGUMENT_BYTES
from headrace.backends.cpu.fast.kv_pool import FastKVPool
from headrace.backends.cpu.fast.recorder import Program
from headrace.types import ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLACK_BYTES = 64
_KEPT_BYTES = 64 << 20
"""A buffer up to this size is kept however little a step needs."""


class Buffers:
    """The memory that steps compute in, one after the other. Mutable; grows with the rows."""

    def __init__(self, program: Program, num_threads: int) -> None:
        self._program = program
        self._buffers: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(
            program.buffer_domains
        )
        self.addresses = np.zeros(1 << 10, np.int64)
        scratch = max(
            (scratch_bytes(shape.head_dim, shape.ratio) for shape in program.attention.values()),
            default=0,
        )
        scratch = max(scratch, program.scratch_row) + ARGUMENT_BYTES
        self.scratch_bytes = -(-scratch // 4096) * 4096
        self.scratch = map_pages(self.scratch_bytes * num_threads)
        self.partials = self.arrivals = np.zeros(0, np.int64)

    def logits(self) -> tuple[int, int]:
        """Where the last step's logits are, and the bytes from row to row."""
        return int(self.addresses[self._program.logits_buffer]), self._program.logits_stride

    def fit(self, rows: tuple[int, int]) -> bool:
        """Whether every buffer has room for so many tokens and samples, and not far too much."""
        return not self._misfits(rows)

    def resize(self, rows: tuple[int, int]) -> None:
        """Make every buffer fit: large enough, without what one rare step (a scored prompt) left behind.

        No step may be computing.
        """
        for number, needed in self._misfits(rows):
            self._buffers[number] = map_pages(needed + needed // 2)
            self.addresses[number] = address(self._buffers[number])

    def _misfits(self, rows: tuple[int, int]) -> list[tuple[int, int]]:
        found = []
        for number, domain in enumerate(self._program.buffer_domains):
            whole = -(-max(1, rows[domain]) // ROWS_TOGETHER) * ROWS_TOGETHER
            needed = whole * self._program.buffer_row_bytes[number] + _SLACK_BYTES
            if not needed <= len(self._buffers[number]) <= max(_KEPT_BYTES, 8 * needed):
                found.append((number, needed))
        return found

    def hold_partials(self, num_bytes: int, num_lines: int) -> None:
        """Have room for the sums that threads share; a step that computes keeps the room it began with."""
        if num_bytes > 8 * len(self.partials):
            self.partials = map_pages(num_bytes + num_bytes // 2).view(np.int64)
        if num_lines * at.LINE_WORDS > len(self.arrivals):
            self.arrivals = np.zeros(2 * num_lines * at.LINE_WORDS, np.int64)


class StepMemory:
    """How one step is described: its parameters, and the arrays they point to. Mutable, used again."""

    def __init__(self, program: Program, buffers: Buffers, num_threads: int) -> None:
        self.parameters = np.zeros(at.NUM_PARAMETERS, np.int64)
        self._program = program
        self._buffers = buffers
        self._counters = np.zeros(len(program.operations) * at.LINE_WORDS, np.int64)
        self._num_threads = num_threads
        self._items = np.zeros((64, at.ITEM_FIELDS), np.int64)
        self._keep: dict[int, Any] = {}
        self._pool: FastKVPool | None = None
        """Held for as long as a worker may read and write in it."""
        self.num_barriers = 0
        """That its operations have; 0 before it is described."""
        for place, value in (
            (at.BUFFERS, address(buffers.addresses)),
            (at.COUNTERS, address(self._counters)),
            (at.SCRATCH, address(buffers.scratch)),
            (at.SCRATCH_BYTES, buffers.scratch_bytes),
            (at.NUM_THREADS, 1),
        ):
            self.parameters[place] = value

    def compute_with(self, unit: int, attend_unit: int) -> None:
        """The addresses of kernels_unit.run_unit_at and kernels_attend_unit.attention_at."""
        self.parameters[at.UNIT], self.parameters[at.ATTEND_UNIT] = unit, attend_unit

    def use_pool(self, pool: FastKVPool) -> None:
        self._pool = pool
        self._set_array(at.LAYERS, pool.addresses())
        self.parameters[at.KV_FORM] = pool.form
        self.parameters[at.BLOCK_SIZE] = pool.block_size

    def describe(self, batch: ForwardBatch, drawn: NDArray[np.int32]) -> None:
        """Write one step's facts. `drawn` are the tokens of the step before, or will be."""
        parameters = self.parameters
        parameters[at.STEP_NUMBER] = -1
        num_sequences = len(batch.query_starts) - 1
        for place, array, kind in (
            (at.TOKEN_IDS, batch.token_ids, np.int32),
            (at.SOURCES, batch.token_sources, np.int32),
            (at.POSITIONS, batch.positions, np.int32),
            (at.SAMPLE_ROWS, batch.sample_rows, np.int32),
            (at.QUERY_STARTS, batch.query_starts, np.int32),
            (at.SLOTS, batch.slots, np.int64),
            (at.KV_LENS, batch.kv_lens, np.int32),
            (at.TABLES, batch.block_tables, np.int32),
        ):
            self._set_array(place, np.ascontiguousarray(array, kind))
        self._set_array(at.DRAWN, drawn)
        self._plan_attention(batch)
        parameters[at.PROGRAM] = address(self._program.operations)
        parameters[at.NUM_OPERATIONS] = len(self._program.operations)
        self.num_barriers = self._program.num_barriers
        parameters[at.NUM_TOKENS] = len(batch.token_ids)
        parameters[at.NUM_SAMPLES] = len(batch.sample_rows)
        parameters[at.NUM_SEQUENCES] = num_sequences
        parameters[at.TABLE_WIDTH] = batch.block_tables.shape[2]
        parameters[at.DRAW] = parameters[at.JOIN] = parameters[at.PICKED] = 0

    def pick_into(self, token_ids: NDArray[np.int32], failed: NDArray[np.bool_]) -> None:
        """Have the step find its best tokens, and give no logits."""
        self._set_array(at.PICKED, token_ids)
        self._set_array(at.PICKED_FAILED, failed)

    def only_logits(self) -> None:
        """Describe what is left to do for the logits of a step that gave tokens alone, to one thread."""
        head, parameters = self._program.head, self.parameters
        parameters[at.PICKED] = 0
        parameters[at.PROGRAM] = address(self._program.operations[head:])
        parameters[at.NUM_OPERATIONS] = len(self._program.operations) - head

    def draw_with(self, function: int, arguments: NDArray[np.int64], keep: object) -> None:
        """Have the step draw too: see layout's DRAW."""
        self.parameters[at.DRAW] = function
        self._set_array(at.DRAW_ARGUMENTS, arguments)
        self._keep[at.DRAW] = keep

    def _plan_attention(self, batch: ForwardBatch) -> None:
        """Write the items of every KV group, one group after the other, and hold the memory they share."""
        starts = np.zeros(len(batch.kv_lens) + 1, np.int64)
        num_bytes = num_lines = 0
        for group in range(len(batch.kv_lens)):
            shape = self._program.attention.get(group)
            first = used = int(starts[group])
            if shape is not None:
                facts = (
                    shape.window, shape.num_kv_heads, shape.ratio, sum_bytes(shape.head_dim)
                )  # fmt: skip
                lens = np.ascontiguousarray(batch.kv_lens[group], np.int32)
                queries = np.ascontiguousarray(batch.query_starts, np.int32)
                while True:
                    count, partial, lines = plan_items(
                        queries, lens, facts, self._num_threads, self._items[first:]
                    )
                    used = first + count
                    if used <= len(self._items):
                        break
                    more = np.zeros((2 * used, at.ITEM_FIELDS), np.int64)
                    more[:first] = self._items[:first]
                    self._items = more
                num_bytes, num_lines = max(num_bytes, partial), max(num_lines, lines)
            starts[group + 1] = used
        self._set_array(at.ITEMS, self._items)
        self._set_array(at.ITEM_STARTS, starts)
        self._buffers.hold_partials(num_bytes, num_lines)
        self._set_array(at.PARTIALS, self._buffers.partials)
        self._set_array(at.ARRIVALS, self._buffers.arrivals)

    def _set_array(self, place: int, array: NDArray[Any]) -> None:
        self._keep[place] = array
        self.parameters[place] = address(array)
