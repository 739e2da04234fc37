"""What one step needs in memory: parameters for the interpreter, activations, the plan of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address, map_pages
from headrace.backends.cpu.fast.kernels_attend import partial_bytes, scratch_bytes
from headrace.backends.cpu.fast.kernels_attend_plan import plan_items
from headrace.backends.cpu.fast.kv_pool import FastKVPool
from headrace.backends.cpu.fast.recorder import Program
from headrace.types import ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLACK_BYTES = 64
_KEPT_BYTES = 64 << 20
"""A buffer up to this size is kept however little a step needs."""


class StepMemory:
    """The parameters of a step and the memory it computes in. Mutable; buffers grow with the rows."""

    def __init__(self, program: Program, num_threads: int) -> None:
        self.parameters = np.zeros(at.NUM_PARAMETERS, np.int64)
        self._program = program
        self._buffers: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(
            program.buffer_domains
        )
        self._addresses = np.zeros(1 << 10, np.int64)
        count = len(program.operations)
        self._counters = np.zeros(count * at.LINE_WORDS, np.int64)
        self._num_threads = num_threads
        self._items = np.zeros((64, at.ITEM_FIELDS), np.int64)
        self._partials = self._arrivals = np.zeros(0, np.int64)
        scratch = max(
            (scratch_bytes(shape.head_dim, shape.ratio) for shape in program.attention.values()),
            default=0,
        )
        scratch = -(-max(scratch, program.scratch_row, 1) // 4096) * 4096
        self._scratch = map_pages(scratch * num_threads)
        self._keep: dict[int, NDArray[Any]] = {}
        for place, value in (
            (at.NUM_OPERATIONS, 0),
            (at.PROGRAM, address(program.operations)),
            (at.BUFFERS, address(self._addresses)),
            (at.COUNTERS, address(self._counters)),
            (at.SCRATCH, address(self._scratch)),
            (at.SCRATCH_BYTES, scratch),
            (at.NUM_THREADS, 1),
        ):
            self.parameters[place] = value

    def use_pool(self, pool: FastKVPool) -> None:
        self._set_array(at.LAYERS, pool.addresses())
        self.parameters[at.KV_FORM] = pool.form
        self.parameters[at.BLOCK_SIZE] = pool.block_size

    def describe(self, batch: ForwardBatch, drawn: NDArray[np.int32]) -> None:
        """Write one step's facts. `drawn` are the tokens of the step before."""
        token_ids = batch.token_ids
        if (batch.token_sources >= 0).any():
            sources = batch.token_sources
            token_ids = np.where(sources >= 0, drawn[np.maximum(sources, 0)], token_ids)
        num_sequences = len(batch.query_starts) - 1
        for place, array, kind in (
            (at.TOKEN_IDS, token_ids, np.int32),
            (at.POSITIONS, batch.positions, np.int32),
            (at.SAMPLE_ROWS, batch.sample_rows, np.int32),
            (at.QUERY_STARTS, batch.query_starts, np.int32),
            (at.SLOTS, batch.slots, np.int64),
            (at.KV_LENS, batch.kv_lens, np.int32),
            (at.TABLES, batch.block_tables, np.int32),
        ):
            self._set_array(place, np.ascontiguousarray(array, kind))
        self._plan_attention(batch)
        parameters = self.parameters
        parameters[at.NUM_OPERATIONS] = len(self._program.operations)
        parameters[at.NUM_TOKENS] = len(token_ids)
        parameters[at.NUM_SAMPLES] = len(batch.sample_rows)
        parameters[at.NUM_SEQUENCES] = num_sequences
        parameters[at.TABLE_WIDTH] = batch.block_tables.shape[2]
        self._grow((len(token_ids), len(batch.sample_rows)))

    def logits(self) -> tuple[int, int]:
        """Where the last step's logits are, and the bytes from row to row."""
        return int(self._addresses[self._program.logits_buffer]), self._program.logits_stride

    def _plan_attention(self, batch: ForwardBatch) -> None:
        """Write the items of every KV group, one group after the other, and hold the memory they share."""
        starts = np.zeros(len(batch.kv_lens) + 1, np.int64)
        num_bytes = num_lines = 0
        for group in range(len(batch.kv_lens)):
            shape = self._program.attention.get(group)
            first = used = int(starts[group])
            if shape is not None:
                facts = (
                    shape.window, shape.num_kv_heads, shape.ratio, partial_bytes(shape.head_dim)
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
        if num_bytes > 8 * len(self._partials):
            self._partials = map_pages(num_bytes + num_bytes // 2).view(np.int64)
        if num_lines * at.LINE_WORDS > len(self._arrivals):
            self._arrivals = np.zeros(2 * num_lines * at.LINE_WORDS, np.int64)
        self._set_array(at.PARTIALS, self._partials)
        self._set_array(at.ARRIVALS, self._arrivals)

    def _grow(self, rows: tuple[int, int]) -> None:
        """Make every buffer large enough; give back what one rare step (a scored prompt) left behind."""
        for number, domain in enumerate(self._program.buffer_domains):
            needed = max(1, rows[domain]) * self._program.buffer_row_bytes[number] + _SLACK_BYTES
            held = len(self._buffers[number])
            if needed <= held <= max(_KEPT_BYTES, 8 * needed):
                continue
            self._buffers[number] = map_pages(needed + needed // 2)
            self._addresses[number] = address(self._buffers[number])

    def _set_array(self, place: int, array: NDArray[Any]) -> None:
        self._keep[place] = array
        self.parameters[place] = address(array)
