"""Runs the same batches on the CPU fast path and on the NumPy oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.runner import OpsRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.models.gguf_types import FORMAT_OF_SCHEME
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.small_models import bf16_exact, plain_part, small_model
from headrace.types import EngineSettings, WeightPart

Floats = NDArray[np.float32]
MAX_POSITIONS = 2048
BLOCKS = 40
VOCAB = 50
RANDOM = np.random.default_rng(5)


class OracleRunner:
    """OpsRunner on NumpyOps that keeps the result of the forward."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self._ops = NumpyOps()
        self._model = model
        self._runner = OpsRunner(self._ops, model, SingleRank(), settings, schemes=NumpyOps.schemes)

    def result(self, batches: Sequence[Any]) -> Floats:
        self._runner.allocate(BLOCKS)
        for batch in batches:
            step = self._ops.plan_step(batch)
            found = self._model.architecture.forward(
                self._ops, SingleRank(), self._runner._weights, step
            )
        return np.asarray(found, np.float32)


def settings_for(
    num_threads: int = 2, block_size: int = 16, kv_dtype: str = "bfloat16"
) -> EngineSettings:
    return EngineSettings(
        num_threads=num_threads,
        block_size=block_size,
        max_model_len=MAX_POSITIONS,
        kv_dtype=kv_dtype,
        activations="precise",
    )


def both(
    model: LoadedModel, batches: Sequence[Any], settings: EngineSettings | None = None
) -> tuple[Floats, Floats]:
    """Return what the fast path and what the oracle give for the last batch."""
    settings = settings or settings_for()
    runner = FastRunner(model, SingleRank(), settings)
    try:
        runner.allocate(BLOCKS)
        for batch in batches:
            runner.execute(batch)
        found = runner.last_logits()
    finally:
        runner.close()
    return found, OracleRunner(model, settings).result(batches)


def rows_batch(num_rows: int, sample_rows: Sequence[int] | None = None) -> Any:
    """One sequence of tokens 0, 1, ... whose every row (or `sample_rows`) is wanted."""
    wanted = list(range(num_rows)) if sample_rows is None else list(sample_rows)
    tokens = (np.arange(num_rows) % VOCAB).tolist()
    return forward_batch([SequenceStep(tokens, 0, range(BLOCKS), wanted)], block_size=16)


def input_rows(width: int, scale: float = 1.0) -> Floats:
    return bf16_exact(RANDOM.standard_normal((VOCAB, width)) * scale)


def random_blocks(scheme: str, rows: int, columns: int, name: str = "weight") -> WeightPart:
    """Random bytes are valid blocks, once the scales are numbers of a sensible size."""
    block_format = FORMAT_OF_SCHEME[scheme]
    count = rows * columns // block_format.block_size
    blocks = RANDOM.integers(0, 256, (count, block_format.block_bytes), np.uint8)
    places = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
    for place in places.get(scheme, (0,)):
        numbers = (RANDOM.standard_normal(count) * 0.02).astype(np.float16)
        blocks[:, place : place + 2] = numbers.view(np.uint8).reshape(count, 2)
    return WeightPart(name, scheme, (rows, columns), blocks.reshape(rows, -1))


def product_model(
    parts: Sequence[WeightPart], rows: Floats, bias: Floats | None = None
) -> LoadedModel:
    """embed -> linear -> take_rows."""
    named = {"embedding": plain_part("embedding", rows)}
    named |= {f"{index}": part for index, part in enumerate(parts)}

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        stacked = [part for name, part in parts.items() if name != "embedding"]
        return ops.hold([parts["embedding"]]), ops.hold(stacked, bias)

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.take_rows(ops.embed(weights[0], step), step)
        return ops.linear(x, weights[1])

    width = sum(part.shape[0] for part in parts)
    return small_model(named, load, forward, width=width)
