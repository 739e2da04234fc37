"""Drives a model on any Ops without an engine: logits at every position, and greedy text.

Blocks are handed out in a shuffled order, so that a backend which forgets the block table fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.runner import share_of
from headrace.group import SingleRank
from headrace.interfaces import Group, LoadedModel, LoadSettings, Ops
from headrace.models import BUILTIN
from headrace.models.checkpoint import open_model
from headrace.types import ForwardBatch, WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAIN_SCHEMES = frozenset({"f32", "f16", "bf16"})


def open_checkpoint(path: Path) -> LoadedModel:
    """Open a GGUF file or a checkpoint folder of one of the built-in architectures."""
    architectures = {}
    for name, where in BUILTIN.items():
        module, _, class_name = where.partition(":")
        architectures[name] = getattr(importlib.import_module(module), class_name)
    return open_model(path, name=path.stem, registry_models=architectures)


class ModelDriver:
    """One model held by `ops`, with a KV pool of its own."""

    def __init__(
        self,
        ops: Ops,
        model: LoadedModel,
        *,
        schemes: frozenset[str] = PLAIN_SCHEMES,
        num_blocks: int = 64,
        block_size: int = 16,
        group: Group | None = None,
    ) -> None:
        def expand(part: WeightPart) -> WeightPart:
            return part if part.scheme in schemes else model.expand(part)

        self._ops = ops
        self._architecture = model.architecture
        self._group = group or SingleRank()
        self._block_size = block_size
        self._block_ids = np.random.default_rng(num_blocks).permutation(num_blocks).tolist()
        settings = LoadSettings(
            max_positions=num_blocks * block_size, expand=expand, schemes=schemes
        )
        self._weights = model.architecture.load(ops, model.tensors, self._group, settings)
        groups = [share_of(spec, self._group) for spec in model.architecture.kv_groups()]
        self._num_groups = len(groups)
        ops.allocate_kv(groups, num_blocks, block_size)

    def logits(
        self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None = None, *, skip: int = 0
    ) -> NDArray[np.floating]:
        """Return [T - skip, vocab]: the logits behind every token but the first `skip`.

        They are computed in chunks of `chunk_sizes`, or all at once.
        """
        blocks = self._blocks_for([len(token_ids)])[0]
        rows, done = [], 0
        for size in chunk_sizes or [len(token_ids)]:
            tokens = token_ids[done : done + size]
            wanted = range(max(0, skip - done), len(tokens))
            batch = self._batch([SequenceStep(tokens, done, blocks, wanted)])
            rows.append(np.asarray(self._forward(batch)))
            done += size
        assert done == len(token_ids), f"chunks hold {done} tokens, there are {len(token_ids)}"
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the next `num_tokens` tokens of each prompt, all decoded in one batch."""
        blocks = self._blocks_for([len(prompt) + num_tokens for prompt in prompts])
        first = [
            self._draw([SequenceStep(prompt, 0, table)])[0]
            for prompt, table in zip(prompts, blocks, strict=True)
        ]
        drawn = [first]
        for count in range(1, num_tokens):
            drawn.append(
                self._draw(
                    [
                        SequenceStep([token], len(prompt) + count - 1, table)
                        for token, prompt, table in zip(drawn[-1], prompts, blocks, strict=True)
                    ]
                )
            )
        return [list(tokens) for tokens in zip(*drawn, strict=True)]

    def _draw(self, steps: Sequence[SequenceStep]) -> list[int]:
        batch = self._batch(steps)
        result = self._ops.sample(self._forward(batch), batch.sampling, None)
        self._ops.synchronize()
        return [int(token) for token in result.token_ids]

    def _forward(self, batch: ForwardBatch) -> Any:
        step = self._ops.plan_step(batch)
        return self._architecture.forward(self._ops, self._group, self._weights, step)

    def _batch(self, steps: Sequence[SequenceStep]) -> ForwardBatch:
        return forward_batch(steps, block_size=self._block_size, num_groups=self._num_groups)

    def _blocks_for(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return a block table for each length; raises ValueError where the pool is too small."""
        counts = [-(-length // self._block_size) for length in lengths]
        if sum(counts) > len(self._block_ids):
            raise ValueError(
                f"{sum(counts)} blocks are needed, the pool has {len(self._block_ids)}"
            )
        free: Iterator[int] = iter(self._block_ids)
        return [[next(free) for _ in range(count)] for count in counts]
