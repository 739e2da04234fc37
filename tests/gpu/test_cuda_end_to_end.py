"""A model on the emulated device: real operations, plans and launches, equal to the CPU backend's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.cuda_cpp import cuda_kernels, needs_cuda_cpp

from headrace.backends.cpu.ops import CpuOps
from headrace.backends.gpu.ops import GpuOps
from headrace.testing.cuda_cpu.launcher import EmulatedDevice
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import EngineSettings

pytestmark = [needs_cuda_cpp, pytest.mark.kernels]
PROMPT = [40, 77, 12, 300, 5, 9, 141, 60, 7, 7, 81, 19, 200, 33, 2, 250, 99, 31, 18, 64]


def gpu_ops(settings: EngineSettings, num_heads: int) -> tuple[GpuOps, Any]:
    kernels, launcher = cuda_kernels()
    ops = GpuOps(kernels, EmulatedDevice(), settings, "cupy_raw")
    ops.set_query_heads(num_heads)
    return ops, launcher


@pytest.mark.parametrize(
    ("model_type", "dtype", "kv_dtype", "tolerance"),
    [
        ("llama", "float32", "float32", 1e-5),
        ("gemma3_text", "bfloat16", "bfloat16", 0.03),
        ("qwen3", "float32", "float32", 1e-5),
    ],
)
def test_logits_equal_the_cpu_backends(
    tmp_path: Path, model_type: str, dtype: str, kv_dtype: str, tolerance: float
) -> None:
    """A long chunk, a short append and single tokens, at every position."""
    size = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, model_type, config=size, dtype=dtype))
    settings = EngineSettings(dtype=dtype, kv_dtype=kv_dtype, deterministic=True)
    ops, launcher = gpu_ops(settings, 4)
    chunks = [11, 3, 1, 1, 4]
    expected = ModelDriver(CpuOps(settings), model).logits(PROMPT, chunks)
    got = ModelDriver(ops, model).logits(PROMPT, chunks)
    scale = np.abs(expected).max()
    assert np.abs(got - expected).max() < tolerance * scale
    assert launcher.num_launches > 0


def test_greedy_text_equals_the_cpu_backends(tmp_path: Path) -> None:
    size = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, "llama", config=size))
    settings = EngineSettings(dtype="float32", kv_dtype="float32", deterministic=True)
    prompts = [PROMPT[:3], PROMPT, PROMPT[5:9]]
    expected = ModelDriver(CpuOps(settings), model).greedy(prompts, 8)
    assert ModelDriver(gpu_ops(settings, 4)[0], model).greedy(prompts, 8) == expected
