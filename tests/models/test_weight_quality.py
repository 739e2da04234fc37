"""What rounding weights at load, and activations to 8 bits, costs on a real model: bounded, not assumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.cpu.ops import CpuOps
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.shuffled import shuffled
from headrace.text.tokenizer import Tokenizer
from headrace.types import EngineSettings

NUM_TOKENS, CHUNK, NUM_BLOCKS = 384, 192, 32
TEXT = Path(__file__).parents[2] / "LICENSE"
LIMITS = {
    # policy and activations: KL divergence from float32 at most, share of equal best tokens at least
    ("none", "precise"): (0.001, 0.975),
    ("int8", "precise"): (0.006, 0.95),
    ("int8", "int8"): (0.012, 0.93),
    ("mixed", "precise"): (0.45, 0.65),
    ("int4", "precise"): (0.6, 0.58),
}
QUICK = (("int8", "int8"), ("mixed", "precise"))
Expected = tuple[LoadedModel, Sequence[int], NDArray[np.float64]]


@pytest.fixture(scope="module")
def expected(smollm2_gguf: Path) -> Expected:
    """The shuffled model, a text, and the float32 log probabilities of every position."""
    model = shuffled(open_checkpoint(smollm2_gguf))
    tokenizer = Tokenizer(
        model.text.tokenizer_json,
        special_tokens=model.text.special_tokens,
        add_bos_token=model.text.add_bos_token,
    )
    tokens = tokenizer.encode(TEXT.read_text())[:NUM_TOKENS]
    settings = EngineSettings(dtype="float32", kv_dtype="float32", num_threads=2)
    exact = ModelDriver(CpuOps(settings), model, num_blocks=NUM_BLOCKS)
    return model, tokens, log_softmax(exact.logits(tokens, [CHUNK] * (NUM_TOKENS // CHUNK)))


def log_softmax(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def log_probabilities(
    model: LoadedModel, tokens: Sequence[int], policy: Any, activations: str
) -> NDArray[np.float64]:
    settings = EngineSettings(num_threads=2, max_model_len=NUM_TOKENS, activations=activations)
    runner = FastRunner(model, SingleRank(), settings, quantization=policy)
    runner.allocate(NUM_BLOCKS)
    found = []
    for first in range(0, NUM_TOKENS, CHUNK):
        chunk = tokens[first : first + CHUNK]
        step = SequenceStep(chunk, first, range(NUM_BLOCKS), range(len(chunk)))
        runner.execute(forward_batch([step], block_size=16))
        found.append(runner.last_logits())
    runner.close()
    return log_softmax(np.concatenate(found))


@pytest.mark.parametrize(
    ("policy", "activations"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in LIMITS],
)
def test_divergence_from_float32(policy: str, activations: str, expected: Expected) -> None:
    model, tokens, wanted = expected
    registries = Registries.from_manager(create_plugin_manager(discover=False))
    chosen = registries.create("quantization", policy)
    given = log_probabilities(model, tokens, chosen, activations)
    divergence = float((np.exp(wanted) * (wanted - given)).sum(axis=1).mean())
    equal = float((wanted.argmax(axis=1) == given.argmax(axis=1)).mean())
    most, least = LIMITS[policy, activations]
    assert divergence < most and equal > least, (divergence, equal)
