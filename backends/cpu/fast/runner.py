"""The Runner of the fast path: a recorded program, one parallel region per step, and no torch.

It takes what it can run and says no to the rest before anything is loaded twice; the reference path takes over.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.beside import MAX_SHARED_TOKENS, BesideTrial
from headrace.backends.cpu.fast.coding_plan import trial_batch
from headrace.backends.cpu.fast.first_start import FirstStart, uncollected
from headrace.backends.cpu.fast.handles import (
    BesideHandle,
    FastStepHandle,
    Picked,
    wants_best_alone,
)
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_coding import GROUP
from headrace.backends.cpu.fast.kv_pool import FORMS, PIECE_BYTES, FastKVPool, bytes_per_block
from headrace.backends.cpu.fast.packing import SCHEMES, UnsupportedModel
from headrace.backends.cpu.fast.pages import PagePreparer
from headrace.backends.cpu.fast.pool import ThreadPool
from headrace.backends.cpu.fast.recorder import Recorder
from headrace.backends.cpu.fast.sampling import FastSampler
from headrace.backends.cpu.fast.step_memory import Buffers, StepMemory
from headrace.backends.cpu.memory import available_memory
from headrace.backends.quantized import quantized
from headrace.backends.warm_up import warm_up_steps
from headrace.interfaces import Group, LoadedModel, LoadSettings, QuantizationPolicy
from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    WeightPart,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_HEAD_DIM = 512
"""More would overflow the 32-bit sums of int8 keys."""
MAX_CHOSEN_HEAD_DIM = 128
"""Wider heads lose three times as much by one scale for a row (docs/performance.md)."""


def reason_against(settings: EngineSettings, group: Group) -> str:
    """Return why the fast path cannot serve these settings; "" where it can."""
    if settings.dtype == "float32" or settings.kv_dtype not in FORMS:
        return f"dtype {settings.dtype} with kv_dtype {settings.kv_dtype}, not bfloat16"
    if settings.block_size % LANES:
        return f"block_size {settings.block_size} is not a multiple of {LANES}"
    if group.size > 1:
        return f"{group.size} ranks share the model"
    return ""


def chosen_kv_dtype(settings: EngineSettings, groups: Sequence[KVGroupSpec]) -> str:
    """Return how keys and values are kept: in 8 bits where that may be chosen, and activations have 8 too."""
    may_choose = settings.may_choose_kv_dtype and settings.kv_dtype == "bfloat16"
    if not may_choose or settings.activations == "precise":
        return settings.kv_dtype
    is_even = all(group.head_dim <= MAX_CHOSEN_HEAD_DIM for group in groups)
    return "int8" if is_even else settings.kv_dtype


class FastRunner:
    """Runs one model. Implements headrace.interfaces.Runner."""

    def __init__(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        """Hold the weights and record the forward. UnsupportedModel where that cannot be done here."""
        model = quantized(model, quantization)
        self._settings = settings
        self._groups = tuple(model.architecture.kv_groups())
        self._vocab_size = model.architecture.vocab_size
        self._is_closed = False
        self._pool: FastKVPool | None = None
        self._preparer: PagePreparer | None = None
        self._num_blocks = 0
        self._sampler = FastSampler(settings.num_threads)
        self._trial = BesideTrial()
        self._kv_dtype = chosen_kv_dtype(settings, self._groups)
        self._form = FORMS[self._kv_dtype]
        for spec in self._groups:
            if spec.head_dim % LANES or spec.head_dim > MAX_HEAD_DIM:
                raise UnsupportedModel(
                    f"head_dim {spec.head_dim} is not a multiple of {LANES} up to {MAX_HEAD_DIM}"
                )
        recorder = Recorder(self._groups, settings.activations)

        def expand(part: WeightPart) -> WeightPart:
            return part if part.scheme in SCHEMES else model.expand(part)

        load = LoadSettings(
            max_positions=settings.max_model_len,
            expand=expand,
            schemes=SCHEMES,
            report=lambda fraction: report("load", fraction),
        )
        self._first_start = FirstStart(self._form)
        try:
            weights = model.architecture.load(recorder, model.tensors, group, load)  # type: ignore[arg-type]
            logits = model.architecture.forward(recorder, group, weights, None)  # type: ignore[arg-type]
        except BaseException:
            self._first_start.give_up()
            raise
        self._program = recorder.finish(logits)
        self._weight_bytes = recorder.weight_bytes
        self._buffers = Buffers(self._program, settings.num_threads)
        self._steps = [
            StepMemory(self._program, self._buffers, settings.num_threads) for _ in range(2)
        ]
        """The one to be described next comes first; the other one may be under way."""
        self._threads: ThreadPool | None = None
        self._spent: NDArray[np.int64] | None = None
        """What `profile` adds up in: kept, since a worker adds its last wait when the step is over."""

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return self._groups

    def memory(self) -> MemoryReport:
        per_block = bytes_per_block(self._groups, self._settings.block_size, self._form)
        return MemoryReport(
            weight_bytes=self._weight_bytes,
            kv_bytes_per_block=per_block,
            kv_pool_bytes=per_block * self._num_blocks,
            available_bytes=available_memory(),
            kv_dtype=self._kv_dtype,
        )

    def allocate(self, num_blocks: int) -> None:
        assert self._pool is None, "the KV pool is allocated once"
        self._pool = FastKVPool(self._groups, num_blocks, self._settings.block_size, self._form)
        self._preparer = PagePreparer(self._pool.prepare)
        self._num_blocks = num_blocks
        # the first time ever this compiles, beside the process that compiles the rest
        with uncollected():
            self._threads = ThreadPool(self._settings.num_threads, tuple(self._steps))
            from headrace.backends.cpu.fast.kernels_unit import run_unit_at
        self._first_start.close()
        from headrace.backends.cpu.fast.kernels_attend_unit import attention_at

        for step in self._steps:
            step.use_pool(self._pool)
            step.compute_with(int(run_unit_at.address), attention_at(self._form))
        self._sampler.load()
        if any(plan.is_open for plan in self._program.plans):
            self._choose_codings()

    def _choose_codings(self) -> None:
        """See headrace.backends.cpu.fast.coding_plan."""
        sizes = self._vocab_size, self._num_blocks, len(self._groups)
        step = self._describe(trial_batch(self._settings, *sizes))
        step.parameters[at.OBSERVES] = 1
        self._computing().run_alone(step)
        step.parameters[at.OBSERVES] = 0
        for plan in self._program.plans:
            plan.choose()
        self._kv().forget_use()

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
        self._kv().forget_use()
        report(1.0)

    def execute(self, batch: ForwardBatch) -> FastStepHandle:
        threads, note = self._computing(), self._noting(batch, beside=False)
        self._pages().pause()
        step, picked = self._describe(batch), None
        if self._picks(batch):
            picked = Picked(self._sampler.prepare(self._logits(), batch.sampling), self._complete)
            step.pick_into(picked.draw.token_ids, picked.draw.failed)
        num_threads = threads.run(step)
        logits, sampling = self._logits(), batch.sampling
        return FastStepHandle(self._sampler, logits, sampling, num_threads, note, picked)

    def _picks(self, batch: ForwardBatch) -> bool:
        """Whether a step finds its tokens without logits: see headrace.backends.cpu.fast.kernels_pick."""
        return self._program.head > 0 and wants_best_alone(batch.sampling)

    def _complete(self) -> None:
        """Compute the logits of the last step, if it gave tokens alone; masks may ask for more of them."""
        step, threads = self._steps[1], self._computing()
        threads.wait_for_all()
        if step.parameters[at.PICKED] != 0:
            step.only_logits()
            threads.run_alone(step)

    def runs_beside(self, num_tokens: int, num_kv_rows: int) -> bool:
        """Whether such a step is better left to the workers: see headrace.backends.cpu.fast.beside."""
        if self._computing().can_join:
            return num_tokens <= MAX_SHARED_TOKENS
        return self._settings.num_threads > 1 and self._trial.allows(num_tokens, num_kv_rows)

    def execute_beside(self, batch: ForwardBatch) -> BesideHandle:
        """Launch a step that the workers compute and draw while the caller does something else."""
        threads, note = self._computing(), self._noting(batch, beside=True)
        step = self._describe(batch)
        draw = self._sampler.prepare(self._logits(), batch.sampling)
        if self._picks(batch):
            step.pick_into(draw.token_ids, draw.failed)
        else:
            step.draw_with(self._sampler.address, draw.native(), draw)
        self._pages().pause()
        threads.launch(step)
        return BesideHandle(threads, step, draw, note)

    def _noting(self, batch: ForwardBatch, *, beside: bool) -> Callable[[], None]:
        """Return what a step's handle calls when the result is there."""
        if self._computing().can_join:  # nothing is tried out
            return lambda: None
        begun = time.perf_counter()
        num_tokens, num_kv_rows = len(batch.token_ids), int(batch.kv_lens[0].sum())

        def note() -> None:
            now = time.perf_counter()
            self._trial.note(num_tokens, num_kv_rows, beside=beside, begun=begun, now=now)

        return note

    def _computing(self) -> ThreadPool:
        assert not self._is_closed, "the runner is closed"
        assert self._threads is not None, "allocate comes before execute"
        return self._threads

    def _describe(self, batch: ForwardBatch) -> StepMemory:
        """Describe a step where the step before the last one was."""
        step = self._steps[0]
        self._computing().wait(step)
        rows = len(batch.token_ids), len(batch.sample_rows)
        if not self._buffers.fit(rows):
            self._computing().wait_for_all()
            self._buffers.resize(rows)
        highest = int(batch.slots.max()) // self._settings.block_size
        missing = self._kv().note_use(highest)
        if missing:
            self._make_resident(missing)
        step.describe(batch, self._sampler.drawn)
        self._steps.reverse()
        return step

    def _make_resident(self, num_bytes: int) -> None:
        """Have the pages exist that a step writes, by two threads where they are several.

        Left to the threads that compute, both would come to a new huge page together, each clear one, and one
        would be thrown away.
        """
        if num_bytes > PIECE_BYTES and self._settings.num_threads > 1:
            self._pages().allow(at_once=True)
        while self._kv().prepare(ahead=False):
            pass
        self._pages().pause()

    def _logits(self) -> tuple[int, int, int]:
        return (*self._buffers.logits(), self._vocab_size)

    def prepare(self) -> bool:
        """Have a thread prepare memory from now on, while no core is wanted. Always False: nobody waits."""
        self._pages().allow()
        return False

    def profile(self, batch: ForwardBatch) -> dict[str, float]:
        """Run a step; return the milliseconds of core time per kind of operation, all threads together."""
        operations = self._program.operations
        if self._spent is None:
            self._spent = np.zeros((self._settings.num_threads, len(operations), 2), np.int64)
        spent = self._spent
        spent[:] = 0
        self._steps[0].parameters[at.PROFILE] = address(spent)
        self.execute(batch)
        self._steps[1].parameters[at.PROFILE] = 0
        found = {"barrier": float(spent[..., 1].sum()) / 1e6}
        for fields, nanoseconds in zip(operations, spent[..., 0].sum(axis=0), strict=True):
            name = at.CODE_NAMES[fields[at.CODE]]
            if fields[at.CODE] == at.LINEAR:
                name += f" {fields[at.SIZE] * GROUP} x {fields[at.COUNT] * LANES}"
            found[name] = found.get(name, 0.0) + float(nanoseconds) / 1e6
        return found

    def last_logits(self) -> NDArray[np.float32]:
        """Return a copy of the last step's logits [R, vocab], before any filter."""
        self._complete()
        where, stride = self._buffers.logits()
        num_rows = int(self._steps[1].parameters[at.NUM_SAMPLES])
        memory = (ctypes.c_float * (num_rows * stride // 4)).from_address(where)
        rows = np.ctypeslib.as_array(memory).reshape(num_rows, stride // 4)
        return np.array(rows[:, : self._vocab_size], np.float32)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._still_kv().copy_blocks(pairs)

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._still_kv().read_rows(layer, slots)

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        self._still_kv().write_rows(layer, slots, keys, values)

    def close(self) -> None:
        """End the threads and let go of everything. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._first_start.give_up()
        if self._preparer is not None:
            self._preparer.close()
        if self._threads is not None:
            self._threads.close()
        self._sampler.close()
        del self._program, self._steps, self._buffers, self._pool

    def _still_kv(self) -> FastKVPool:
        """Return the pool once no step works in it."""
        if self._threads is not None:
            self._threads.wait_for_all()
        return self._kv()

    def _pages(self) -> PagePreparer:
        assert self._preparer is not None, "allocate comes before any step"
        return self._preparer

    def _kv(self) -> FastKVPool:
        assert self._pool is not None, "allocate comes before any use of the KV pool"
        return self._pool
