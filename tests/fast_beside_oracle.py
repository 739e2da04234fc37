"""Runs the same batches on the CPU fast path and on the NumPy oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.runner import OpsRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.numpy_ops import NumpyOps
from headrace.types import EngineSettings

Floats = NDArray[np.float32]
MAX_POSITIONS = 2048
BLOCKS = 40


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
