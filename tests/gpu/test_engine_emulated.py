"""The engine itself on an emulated GPU: what it generates equals the CPU backend's, both backends alike.

Steps run ahead here as on a device: each is planned and launched before the one before it is fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu.cuda_cpp import cuda_kernels, needs_cuda_cpp
from gpu.numba_simulated import needs_numba_cuda, numba_kernels

from headrace.backends.gpu.kernels import Kernels
from headrace.backends.gpu.ops import GpuOps
from headrace.backends.gpu.runner import GpuRunner
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.cuda_cpu.launcher import EmulatedDevice
from headrace.testing.engine_driver import EngineDriver, drive_runner, driver_tokenizer
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings

pytestmark = pytest.mark.kernels
SIZE = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320}
SHARED = [40, 77, 12, 300, 5, 9, 141, 60]  # two blocks
SIZES: dict[str, dict[str, Any]] = {"llama": {}, "gemma3_text": {"sliding_window": 6}}
"""Models, the second with a window shorter than its prompts and a block table for each kind of layer."""
PROMPTS = [[*SHARED, 99, 31], [*SHARED, 18], [4, 8, 15], [*SHARED, 99, 32]]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.3},
]
MAX_TOKENS = 9
LIMITS = {
    "block_size": 4, "max_model_len": 24, "max_num_sequences": 4, "max_batched_tokens": 8,
}  # fmt: skip
Answers = list[list[int]]


def settings(**changed: Any) -> EngineSettings:
    return EngineSettings(
        dtype="float32", kv_dtype="float32", deterministic=True, **{**LIMITS, **changed}
    )


def drive(runner: Any, model: LoadedModel, chosen: EngineSettings, blocks: int) -> EngineDriver:
    vocab_size = min(model.architecture.vocab_size, driver_tokenizer().vocab_size)
    return drive_runner(runner, chosen, blocks, vocab_size)


def answers(driver: EngineDriver, which: list[int]) -> Answers:
    """Submit these prompts at once and return what each got."""
    names = [
        driver.submit(PROMPTS[k], max_tokens=MAX_TOKENS, **SAMPLINGS[k]) for k in which
    ]  # all greedy but the last
    driver.run()
    driver.assert_empty()
    return [driver.tokens(name) for name in names]


Texts = Callable[[str], tuple[LoadedModel, Answers]]


@pytest.fixture(scope="module")
def texts(tiny_checkpoint: Callable[..., Path]) -> Texts:
    """Return `texts(model_type)`: a tiny model, and what the CPU backend gives each prompt alone.

    Nothing is cached, cut or preempted there.
    """
    from headrace.backends.cpu.backend import CpuBackend

    @functools.cache
    def texts(model_type: str) -> tuple[LoadedModel, Answers]:
        model = open_checkpoint(tiny_checkpoint(model_type, config=SIZE | SIZES[model_type]))
        chosen = settings(prefix_caching=False, max_batched_tokens=64)
        runner = CpuBackend.open(0, None, SystemClock()).create_runner(model, SingleRank(), chosen)
        driver = drive(runner, model, chosen, 32)
        return model, [answers(driver, [k])[0] for k in range(len(PROMPTS))]

    return texts


@pytest.mark.parametrize("model_type", SIZES)
def test_the_texts_are_worth_comparing(texts: Texts, model_type: str) -> None:
    _, expected = texts(model_type)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert all(len(tokens) == MAX_TOKENS for tokens in expected)


@pytest.mark.parametrize(
    ("kernels_of", "name", "model_type"),
    [
        pytest.param(cuda_kernels, "cupy_raw", "llama", marks=needs_cuda_cpp),
        pytest.param(cuda_kernels, "cupy_raw", "gemma3_text", marks=needs_cuda_cpp),
        pytest.param(numba_kernels, "cuda_numba", "llama", marks=needs_numba_cuda),
    ],
)
def test_cut_cached_and_preempted_texts_equal_the_cpu_backends(
    texts: Texts, kernels_of: Callable[[], tuple[Kernels, Any]], name: str, model_type: str
) -> None:
    """At once: longer than a step, two prompts find the first one's prefix, the pool is too small for all."""
    (model, expected), chosen = texts(model_type), settings()
    kernels, launcher = kernels_of()
    ops = GpuOps(kernels, EmulatedDevice(num_multiprocessors=1), chosen, name)
    runner = GpuRunner(ops, model, SingleRank(), chosen)
    assert runner.runs_ahead
    driver = drive(runner, model, chosen, 9)
    assert answers(driver, [0, 1, 2, 3]) == expected
    stats = driver.engine.stats()
    assert stats.prefix_hit_tokens_total >= len(SHARED)
    assert stats.preemptions_total > 0
    assert len(PROMPTS[0]) > LIMITS["max_batched_tokens"]
    assert launcher.num_launches > stats.steps_total
