"""What the fast path's rounding costs on real models, against float32: bounded, not assumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.cpu.ops import CpuOps
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.text.tokenizer import Tokenizer
from headrace.types import EngineSettings

NUM_TOKENS, CHUNK, NUM_BLOCKS = 768, 192, 64
LIMITS = {
    # model: KL divergence from float32 at most, share of equal best tokens at least
    "smollm2_gguf": (0.0005, 0.985),
    "gemma3_gguf": (0.0005, 0.985),
}
TEXT = Path(__file__).parents[2] / "LICENSE"


def fast_logits(model: LoadedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    runner = FastRunner(
        model, SingleRank(), EngineSettings(num_threads=2, max_model_len=NUM_TOKENS)
    )
    runner.allocate(NUM_BLOCKS)
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    found = []
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        step = SequenceStep(chunk, first, blocks, range(len(chunk)))
        runner.execute(forward_batch([step], block_size=16, num_groups=len(runner.kv_groups())))
        found.append(runner.last_logits())
    runner.close()
    return np.concatenate(found)


def log_softmax(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("name", LIMITS)
def test_divergence_from_float32(name: str, request: pytest.FixtureRequest) -> None:
    model = open_checkpoint(request.getfixturevalue(name))
    tokenizer = Tokenizer(
        model.text.tokenizer_json,
        special_tokens=model.text.special_tokens,
        add_bos_token=model.text.add_bos_token,
    )
    tokens = tokenizer.encode(TEXT.read_text())[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    settings = EngineSettings(dtype="float32", kv_dtype="float32", num_threads=2)
    exact = ModelDriver(CpuOps(settings), model, num_blocks=NUM_BLOCKS)
    expected = exact.logits(tokens, [CHUNK] * (NUM_TOKENS // CHUNK))
    found = fast_logits(model, tokens)
    divergence, equal = [], 0
    for first in range(0, NUM_TOKENS, CHUNK):  # a vocabulary of 262,144 in float64 is large
        rows = slice(first, first + CHUNK)
        wanted, given = log_softmax(expected[rows]), log_softmax(found[rows])
        divergence.append((np.exp(wanted) * (wanted - given)).sum(axis=1))
        equal += int((wanted.argmax(axis=1) == given.argmax(axis=1)).sum())
    most, least = LIMITS[name]
    assert np.concatenate(divergence).mean() < most
    assert equal / NUM_TOKENS > least
