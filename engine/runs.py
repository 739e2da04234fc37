"""How many equal steps of decodes one plan may stand for, because nothing can change in between.

Only a runner that repeats steps by itself (a simulated one) asks for this. What it is worth: a simulation
costs the engine one step per change instead of one per token, and says the same as step by step.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from headrace.engine.batch import BatchPlan
from headrace.engine.chunks import decodes
from headrace.engine.kv_cache import KVCache
from headrace.engine.scheduler import Scheduler
from headrace.types import RunBatch

MAX_STEPS = 4096


@dataclass(slots=True)
class PlannedRun:
    """A step that virtual time can run through, and how many like it can follow."""

    batch: RunBatch
    num_steps: int
    """Itself included; 1: only itself."""


def planned_run(plan: BatchPlan, scheduler: Scheduler) -> PlannedRun | None:
    """Return what virtual time needs of a step; None where more than seed and position decides a token.

    The last of its equal steps may end choices. None needs a block that is not free, none meets a
    waiting request that could start, and no token ends a choice by what it is. Nor does one draw a
    choice's first token, which is news, as a prompt with one token left to compute does.
    """
    seeds: list[int] = []
    positions: list[int] = []
    spare: list[int] = []
    num_kv_rows = num_prefill_tokens = 0
    most = MAX_STEPS
    size = scheduler.kv_cache.block_size
    for entry in plan.entries:
        sequence = entry.sequence
        if entry.num_score_rows or len(entry.drawing) > 1 or not sequence.sampling.is_plain:
            return None
        rows, num_tokens = sequence.num_kv_rows(), entry.num_tokens
        num_kv_rows += rows + num_tokens
        if num_tokens > 1:
            num_prefill_tokens += num_tokens
        if entry.drawing:
            seeds.append(sequence.seed if sequence.sampling.params.temperature > 0 else 0)
            positions.append(len(sequence.token_ids))
        if most > 1:
            output = sequence.output
            can_go_on = output.ends_by_length_only and entry.drawing and output.num_tokens
            most = min(most, output.num_tokens_left if can_go_on else 1)
            spare.append(len(sequence.block_ids) * size - rows)
    batch = RunBatch(num_prefill_tokens, len(plan.entries), num_kv_rows, seeds, positions)
    if (
        most <= 1
        or not len(plan.entries) == plan.num_decodes == len(scheduler.running)
        or not _can_only_wait(scheduler)
    ):
        return PlannedRun(batch, 1)
    return PlannedRun(batch, _within_blocks(spare, scheduler, most))


def quiet_steps(scheduler: Scheduler) -> int:
    """Return how many equal steps there are at least until one with news of a choice, itself included.

    News are a choice's first token and its end.

    0: something else may happen before. What comes from outside meanwhile is not foreseen.
    """
    running = scheduler.running
    if scheduler.waiting or not running:
        return 0
    most = MAX_STEPS
    for sequence in running:
        output = sequence.output
        if not (decodes(sequence) and output.ends_by_length_only and sequence.sampling.is_plain):
            return 0
        most = min(most, output.num_tokens_left if output.num_tokens else 1)
    size = scheduler.kv_cache.block_size
    spare = [len(s.block_ids) * size - s.num_kv_rows() for s in running]
    return _within_blocks(spare, scheduler, most)


def _can_only_wait(scheduler: Scheduler) -> bool:
    """Whether whoever waits goes on waiting: no slot is free, and nobody runs who could be taken back."""
    if not scheduler.waiting:
        return True
    first = scheduler.waiting[0].request.priority
    return not scheduler.num_free_slots and all(
        sequence.request.priority <= first for sequence in scheduler.running
    )


def _within_blocks(spare: Items[int], scheduler: Scheduler, most: int) -> int:
    """Return the most steps, at most `most`, whose rows fit the blocks held and the free ones; 1 at least.

    `spare`: of each sequence, the rows left in the blocks it holds.
    """
    size = scheduler.kv_cache.block_size
    num_free = scheduler.kv_cache.pool.num_free

    def fits(num_steps: int) -> bool:
        return sum([-(-(num_steps - s) // size) for s in spare if s < num_steps]) <= num_free

    if fits(most):
        return most
    low, high = 1, most  # the plan itself has its blocks
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fill_blocks(plan: BatchPlan, kv_cache: KVCache, starts: Items[float]) -> None:
    """Take and publish the blocks of a run in the order, and at the times, of its single steps.

    `starts` says when each step began. What is evicted, and which of two equal blocks is the one to be
    found, depends on that order. Afterwards the sequences have computed their tokens of all steps.
    """
    size, num_steps = kv_cache.block_size, len(starts)
    entries = plan.entries
    begun = [entry.sequence.num_computed_tokens for entry in entries]
    events: list[tuple[int, bool, int]] = []
    """(step, False to take a block or True to publish, entry)"""
    for order, entry in enumerate(entries):
        sequence = entry.sequence
        spare = len(sequence.block_ids) * size - sequence.num_kv_rows()
        if spare < num_steps:
            events += [(step, False, order) for step in range(spare, num_steps, size)]
        last_of_block = size - 1 - begun[order] % size
        if last_of_block < num_steps:
            events += [(step, True, order) for step in range(last_of_block, num_steps, size)]
    events.sort()
    for step, publishes, order in events:
        sequence = entries[order].sequence
        sequence.num_computed_tokens = begun[order] + step + publishes
        kv_cache.pool.now = starts[step]
        if publishes:
            kv_cache.publish(sequence)
        else:
            has_room = kv_cache.try_grow(sequence, 1)
            assert has_room, "planned_run counted the blocks"
    kv_cache.pool.now = starts[-1]
    for entry, num_begun in zip(entries, begun, strict=True):
        entry.sequence.num_computed_tokens = num_begun + num_steps
