"""The Runner of the fast path: a recorded program, one parallel region per step, and no torch.

It takes what it can run and says no to the rest before anything is loaded twice; the reference path takes over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address, map_pages
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_attend import MAX_VECTORS, scratch_bytes
from headrace.backends.cpu.fast.kv_pool import FastKVPool, bytes_per_block
from headrace.backends.cpu.fast.packing import SCHEMES, UnsupportedModel
from headrace.backends.cpu.fast.pool import ThreadPool
from headrace.backends.cpu.fast.recorder import Program, Recorder
from headrace.backends.cpu.fast.sampling import FastSampler
from headrace.backends.cpu.memory import available_memory
from headrace.backends.warm_up import warm_up_steps
from headrace.interfaces import Group, LoadedModel, LoadSettings
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    SamplingBatch,
    StepResult,
    TokenMasks,
    WeightPart,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_STEP_WORK = 1 << 19
"""Multiplications below which a step has one thread: waking the others costs more."""


def reason_against(settings: EngineSettings, group: Group) -> str:
    """Return why the fast path cannot serve these settings; "" where it can."""
    if settings.deterministic:
        return "deterministic is true"
    if settings.dtype == "float32" or settings.kv_dtype != "bfloat16":
        return f"dtype {settings.dtype} with kv_dtype {settings.kv_dtype}, not bfloat16"
    if settings.block_size % LANES:
        return f"block_size {settings.block_size} is not a multiple of {LANES}"
    if group.size > 1:
        return f"{group.size} ranks share the model"
    return ""


class FastStepHandle:
    """A step whose forward has run. Implements headrace.interfaces.StepHandle."""

    def __init__(
        self, sampler: FastSampler, logits: tuple[int, int, int], sampling: SamplingBatch
    ) -> None:
        self._sampler = sampler
        self._logits = logits
        self._sampling = sampling
        self._result: StepResult | None = None

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert self._result is None, "sample is called once per step"
        self._result = self._sampler.sample(self._logits, self._sampling, masks)

    def result(self) -> StepResult:
        assert self._result is not None, "sample comes before result"
        return self._result


class FastRunner:
    """Runs one model. Implements headrace.interfaces.Runner."""

    def __init__(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        """Hold the weights and record the forward. UnsupportedModel where that cannot be done here."""
        self._settings = settings
        self._groups = tuple(model.architecture.kv_groups())
        self._vocab_size = model.architecture.vocab_size
        self._is_closed = False
        self._pool: FastKVPool | None = None
        self._num_blocks = 0
        self._sampler = FastSampler()
        for spec in self._groups:
            if spec.head_dim % LANES:
                raise UnsupportedModel(f"head_dim {spec.head_dim} is not a multiple of {LANES}")
        recorder = Recorder(self._groups)

        def expand(part: WeightPart) -> WeightPart:
            return part if part.scheme in SCHEMES else model.expand(part)

        load = LoadSettings(
            max_positions=settings.max_model_len,
            expand=expand,
            schemes=SCHEMES,
            report=lambda fraction: report("load", fraction),
        )
        weights = model.architecture.load(recorder, model.tensors, group, load)  # type: ignore[arg-type]
        logits = model.architecture.forward(recorder, group, weights, None)  # type: ignore[arg-type]
        self._program = recorder.finish(logits)
        self._weight_bytes = recorder.weight_bytes
        self._step = StepMemory(self._program, settings.num_threads)
        self._threads = ThreadPool(settings.num_threads, self._step.parameters)

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return self._groups

    def memory(self) -> MemoryReport:
        per_block = bytes_per_block(self._groups, self._settings.block_size)
        return MemoryReport(
            weight_bytes=self._weight_bytes,
            kv_bytes_per_block=per_block,
            kv_pool_bytes=per_block * self._num_blocks,
            available_bytes=available_memory(),
        )

    def allocate(self, num_blocks: int) -> None:
        assert self._pool is None, "the KV pool is allocated once"
        self._pool = FastKVPool(self._groups, num_blocks, self._settings.block_size)
        self._num_blocks = num_blocks
        self._step.use_pool(self._pool)

    def warm_up(self, report: Callable[[float], None]) -> None:
        assert self._num_blocks > 0, "allocate comes before warm_up"
        steps = warm_up_steps(
            self._settings,
            num_groups=len(self._groups),
            num_blocks=self._num_blocks,
            vocab_size=self._vocab_size,
        )
        for done, (batch, masks) in enumerate(steps):
            report(done / len(steps))
            handle = self.execute(batch)
            handle.sample(masks)
            handle.result()
        report(1.0)

    def execute(self, batch: ForwardBatch) -> FastStepHandle:
        assert not self._is_closed, "the runner is closed"
        assert self._pool is not None, "allocate comes before execute"
        self._step.describe(batch, self._sampler.drawn)
        self._threads.run()
        logits = (*self._step.logits(), self._vocab_size)
        return FastStepHandle(self._sampler, logits, batch.sampling)

    def last_logits(self) -> NDArray[np.float32]:
        """Return a copy of the last step's logits [R, vocab], before any filter."""
        where, stride = self._step.logits()
        num_rows = int(self._step.parameters[at.NUM_SAMPLES])
        memory = (ctypes.c_float * (num_rows * stride // 4)).from_address(where)
        rows = np.frombuffer(memory, np.float32).reshape(num_rows, stride // 4)
        return rows[:, : self._vocab_size].copy()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._kv().copy_blocks(pairs)

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._kv().read_rows(layer, slots)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        self._kv().write_rows(layer, slots, keys, values)

    def close(self) -> None:
        """End the threads and let go of everything. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.close()
        del self._program, self._step, self._pool

    def _kv(self) -> FastKVPool:
        assert self._pool is not None, "allocate comes before any use of the KV pool"
        return self._pool


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
        self._queries = min(
            (max(1, MAX_VECTORS // ratio) for _, ratio in program.ratios), default=1
        )
        scratch = max(
            (scratch_bytes(head_dim, ratio) for head_dim, ratio in program.ratios), default=0
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
        items = self._items(np.diff(batch.query_starts))
        self._set_array(at.ITEMS, items)
        parameters = self.parameters
        parameters[at.NUM_OPERATIONS] = len(self._program.operations)
        parameters[at.NUM_ITEMS] = len(items)
        parameters[at.NUM_TOKENS] = len(token_ids)
        parameters[at.NUM_SAMPLES] = len(batch.sample_rows)
        parameters[at.NUM_SEQUENCES] = num_sequences
        parameters[at.TABLE_WIDTH] = batch.block_tables.shape[2]
        self._grow((len(token_ids), len(batch.sample_rows)))

    def logits(self) -> tuple[int, int]:
        """Where the last step's logits are, and the bytes from row to row."""
        return int(self._addresses[self._program.logits_buffer]), self._program.logits_stride

    def _items(self, num_queries: NDArray[np.int32]) -> NDArray[np.int64]:
        """Attention's items [n, 3]: sequence, first query, count. A prompt's last, the longest, come first."""
        if len(num_queries) == 0 or int(num_queries.max()) == 1:
            items = np.zeros((len(num_queries), 3), np.int64)
            items[:, 0], items[:, 2] = np.arange(len(num_queries)), num_queries
            return items[items[:, 2] > 0]
        listed = [
            (sequence, first, min(self._queries, count - first))
            for sequence, count in enumerate(num_queries.tolist())
            for first in range(0, count, self._queries)
        ]
        return np.array(listed[::-1], np.int64).reshape(-1, 3)

    def _grow(self, rows: tuple[int, int]) -> None:
        for number, domain in enumerate(self._program.buffer_domains):
            needed = max(1, rows[domain]) * self._program.buffer_row_bytes[number] + 64
            if len(self._buffers[number]) < needed:
                self._buffers[number] = map_pages(needed + needed // 2)
                self._addresses[number] = address(self._buffers[number])

    def _set_array(self, place: int, array: NDArray[Any]) -> None:
        self._keep[place] = array
        self.parameters[place] = address(array)
