"""A model on the simulator through the real operations and launches, equal to the CPU backend's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.numba_simulated import needs_numba_cuda, numba_kernels

from headrace.backends.cpu.ops import CpuOps
from headrace.backends.gpu.ops import GpuOps
from headrace.testing.cuda_cpu.launcher import EmulatedDevice
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import EngineSettings

pytestmark = [needs_numba_cuda, pytest.mark.kernels]
PROMPT = [40, 77, 12, 300, 5, 9, 141, 60, 7, 7, 81, 19, 200, 33, 2, 250, 99, 31, 18, 64]
SIZE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def gpu_ops(settings: EngineSettings) -> tuple[GpuOps, Any]:
    kernels, launcher = numba_kernels()
    ops = GpuOps(kernels, EmulatedDevice(), settings, "cuda_numba")
    ops.set_query_heads(SIZE["num_attention_heads"])
    return ops, launcher


@pytest.mark.parametrize(
    ("model_type", "dtype", "tolerance"),
    [("llama", "float32", 1e-5), ("gemma3_text", "bfloat16", 0.03)],
)
def test_logits_equal_the_cpu_backends(
    tmp_path: Path, model_type: str, dtype: str, tolerance: float
) -> None:
    """A long chunk, a short append and single tokens, at every position."""
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, model_type, config=SIZE, dtype=dtype))
    settings = EngineSettings(dtype=dtype, kv_dtype=dtype, deterministic=True)
    ops, launcher = gpu_ops(settings)
    chunks = [12, 3, 1]
    expected = ModelDriver(CpuOps(settings), model).logits(PROMPT[:16], chunks)
    got = ModelDriver(ops, model).logits(PROMPT[:16], chunks)
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()
    assert launcher.num_launches > 0


def test_greedy_text_equals_the_cpu_backends(tmp_path: Path) -> None:
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, "llama", config=SIZE))
    settings = EngineSettings(dtype="float32", kv_dtype="float32", deterministic=True)
    prompts = [PROMPT[:3], PROMPT[5:9]]
    expected = ModelDriver(CpuOps(settings), model).greedy(prompts, 5)
    assert ModelDriver(gpu_ops(settings)[0], model).greedy(prompts, 5) == expected
