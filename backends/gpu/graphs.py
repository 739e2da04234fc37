"""A decode step whose tensors stay where they are, so that it can be recorded once and replayed.

A step of n decodes is filled up to its bucket: filling tokens have slot -1, are planned for nothing, and what
they compute is not looked at. Where the device cannot record, the same step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
import torch

from headrace.backends.gpu.ops import GpuOps
from headrace.backends.gpu.step import (
    GpuStep,
    GroupShape,
    GroupStep,
    blocks_wanted,
    device_work,
    plan_group,
    token_ids_of,
    up,
)
from headrace.backends.gpu.work_list import MERGE_COLUMNS, PIECE_COLUMNS, WorkList
from headrace.types import ForwardBatch

Forward = Callable[[Any], torch.Tensor]


def is_decode(batch: ForwardBatch) -> bool:
    """Say whether every sequence computes one token and samples behind it, in order."""
    num_sequences = len(batch.query_starts) - 1
    return (
        num_sequences > 0
        and len(batch.token_ids) == num_sequences
        and np.array_equal(batch.sample_rows, np.arange(num_sequences))
        and bool((np.diff(batch.query_starts) == 1).all())
    )


class DecodeStep:
    """The step of one bucket. Mutable: `fill` writes a batch into the tensors that the recording reads."""

    def __init__(self, ops: GpuOps, bucket: int, table_width: int) -> None:
        """`table_width`: blocks of the longest sequence there can be."""
        device = ops.device.torch_device
        self._ops = ops
        self._bucket = bucket
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None
        groups = []
        for shape in ops.group_shapes():
            table = np.zeros((bucket, table_width), np.int32)
            work = device_work(self._empty_list(shape), table, shape, device)
            slots = torch.full((bucket,), -1, dtype=torch.int64, device=device)
            groups.append(GroupStep(slots, work, ()))
        zeros = torch.zeros(bucket, dtype=torch.int32, device=device)
        rows = torch.arange(bucket, dtype=torch.int32, device=device)
        self.step = GpuStep(zeros, zeros.clone(), rows, tuple(groups))

    def _empty_list(self, shape: GroupShape) -> WorkList:
        room = self._bucket + blocks_wanted(shape, self._ops.device.num_multiprocessors)
        return WorkList(
            np.zeros((room, PIECE_COLUMNS), np.int32),
            np.zeros((self._bucket, MERGE_COLUMNS), np.int32),
            np.zeros(2, np.int32),
            shape.tile_tokens,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Write a batch of at most `bucket` decodes."""
        count, step = len(batch.token_ids), self.step
        device = step.token_ids.device
        step.token_ids[:count] = token_ids_of(batch, self._ops.drawn)
        step.positions[:count] = up(batch.positions, np.int32, device)
        step.positions[count:] = 0
        shapes = self._ops.group_shapes()
        for index, (shape, group) in enumerate(zip(shapes, step.groups, strict=True)):
            planned = plan_group(
                batch, index, shape, self._ops.device.num_multiprocessors, self._bucket
            )
            work = group.work
            assert work is not None, "a decode step has a work list"
            group.slots[:count] = up(batch.slots[index], np.int64, device)
            group.slots[count:] = -1
            work.pieces.copy_(up(planned.pieces, np.int32, device))
            work.merges.copy_(up(planned.merges, np.int32, device))
            work.counts.copy_(up(planned.counts, np.int32, device))
            table = batch.block_tables[index]
            work.block_table[: len(table), : table.shape[1]] = up(table, np.int32, device)

    def num_bytes(self) -> int:
        """Return what the tensors that a recording reads take; its logits are not among them."""
        step = self.step
        tensors = [step.token_ids, step.positions, step.sample_rows]
        for group in step.groups:
            work = group.work
            assert work is not None, "a decode step has a work list"
            tensors += [group.slots, work.pieces, work.merges, work.counts, work.block_table]
            tensors += [work.partial_rows, work.partial_sums]
        return sum(tensor.nbytes for tensor in tensors)

    def capture(self, forward: Forward, pool: Any = None) -> None:
        """Record `forward`. Every kernel it launches has been loaded before.

        `pool` (torch.cuda.graph_pool_handle) is shared with other recordings: what one keeps between its
        kernels, another may overwrite, as they run one after the other and logits are copied at once.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._logits = forward(self.step)
        self._graph = graph

    def run(self, forward: Forward, count: int) -> torch.Tensor:
        """Return the logits [count, vocab] of what was filled in: replayed where recorded."""
        if self._graph is None:
            return forward(self.step)[:count]
        self._graph.replay()
        assert self._logits is not None, "a recording has its logits"
        return self._logits[:count].clone()


def try_capture(step: DecodeStep, forward: Forward, bucket: int, pool: Any = None) -> bool:
    """Record a step, and say whether it worked; the reason goes to the log where not."""
    try:
        step.capture(forward, pool)
    except RuntimeError as error:
        structlog.get_logger(__name__).warning(
            "decode steps run without a CUDA graph",
            bucket=bucket,
            reason=str(error).splitlines()[0],
        )
        return False
    return True
