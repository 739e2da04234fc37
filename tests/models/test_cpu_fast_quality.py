"""What rounding costs on real models, against float32 over 2,000 tokens of English: bounded, not assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.runner import OpsRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.model_driver import open_checkpoint
from headrace.text.tokenizer import Tokenizer
from headrace.types import EngineSettings, ForwardBatch

TEXT = Path(__file__).with_name("english_text.txt")
NUM_TOKENS, CHUNK, NUM_BLOCKS = 2000, 250, 126
LENGTHS = {"smollm2_gguf": NUM_TOKENS, "gemma3_gguf": 500}
EVERY = {"smollm2_gguf": 2, "gemma3_gguf": 4}
"""Logits are compared behind every n-th token: all rows of a vocabulary of 262,144 take minutes."""
REFERENCE_TOKENS = 500
"""What "reference bf16" is held against: it takes longest and is a yardstick for the others."""
REPRESENTATIONS: Mapping[str, dict[str, Any]] = {
    "reference bf16": {},
    "fast": {"may_choose_kv_dtype": True},
    "fast, KV bf16": {},
    "fast, activations precise": {"activations": "precise"},
    "fast, KV int8": {"kv_dtype": "int8", "activations": "precise"},
    "fast, activations int8": {"activations": "int8"},
}
LIMITS = {
    # model and representation: KL divergence from float32 at most, share of equal best tokens at least
    ("smollm2_gguf", "reference bf16"): (0.0005, 0.98),
    ("smollm2_gguf", "fast"): (0.0010, 0.96),
    ("smollm2_gguf", "fast, KV bf16"): (0.0008, 0.96),
    ("smollm2_gguf", "fast, activations precise"): (0.0002, 0.99),
    ("smollm2_gguf", "fast, KV int8"): (0.0003, 0.98),
    ("smollm2_gguf", "fast, activations int8"): (0.0040, 0.95),
    ("gemma3_gguf", "reference bf16"): (0.0005, 0.95),
    ("gemma3_gguf", "fast"): (0.0010, 0.95),
    ("gemma3_gguf", "fast, activations precise"): (0.0002, 0.95),
    ("gemma3_gguf", "fast, KV int8"): (0.0015, 0.93),
    ("gemma3_gguf", "fast, activations int8"): (0.0080, 0.90),
}
Rows = NDArray[np.float32]


@dataclass(slots=True)
class Tally:
    """What one representation has shown so far. Mutable."""

    divergence: list[NDArray[np.float64]] = field(default_factory=list)
    num_equal: int = 0

    def add(self, exact: tuple[Rows, Rows], found: Rows) -> None:
        """`exact`: logits of float32 and their log softmax."""
        logits, wanted = exact
        self.divergence.append((np.exp(wanted) * (wanted - log_softmax(found))).sum(1, np.float64))
        self.num_equal += int((logits.argmax(axis=1) == found.argmax(axis=1)).sum())


def log_softmax(rows: Rows) -> Rows:
    shifted = rows - rows.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total), np.float32)


class Candidate:
    """A runner that gives the logits behind a batch's sample rows."""

    def __init__(self, model: LoadedModel, name: str, settings: Mapping[str, Any]) -> None:
        is_fast = name.startswith("fast")
        # torch's threads spin while one of them waits for a core: one takes half the time of two
        full = EngineSettings(num_threads=2 if is_fast else 1, max_model_len=NUM_TOKENS, **settings)
        self.runner: FastRunner | OpsRunner
        if is_fast:
            self.runner = FastRunner(model, SingleRank(), full)
        else:
            ops = CpuOps(full)
            self.runner = OpsRunner(ops, model, SingleRank(), full, schemes=CpuOps.schemes)
        self.runner.allocate(NUM_BLOCKS)

    def logits(self, batch: ForwardBatch) -> Rows:
        handle = self.runner.execute(batch)
        if isinstance(self.runner, FastRunner):
            return self.runner.last_logits()
        return np.asarray(handle._logits.float().numpy())  # type: ignore[union-attr]


def batches(tokens: list[int], every: int, num_groups: int) -> Iterator[ForwardBatch]:
    """Chunks of one sequence through a scattered block table."""
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        step = SequenceStep(chunk, first, blocks, range(0, len(chunk), every))
        yield forward_batch([step], block_size=16, num_groups=num_groups)


def english_tokens(model: LoadedModel) -> list[int]:
    tokenizer = Tokenizer(
        model.text.tokenizer_json,
        special_tokens=model.text.special_tokens,
        add_bos_token=model.text.add_bos_token,
    )
    paragraphs = TEXT.read_text(encoding="utf-8").split("\n\n")
    return tokenizer.encode("\n\n".join(" ".join(p.split()) for p in paragraphs))[:NUM_TOKENS]


@pytest.mark.parametrize("name", EVERY)
def test_divergence_from_float32(name: str, request: pytest.FixtureRequest) -> None:
    model = open_checkpoint(request.getfixturevalue(name))
    tokens = english_tokens(model)[: LENGTHS[name]]
    assert len(tokens) == LENGTHS[name]
    exact = Candidate(model, "float32", {"dtype": "float32", "kv_dtype": "float32"})
    candidates = {
        key: Candidate(model, key, more)
        for key, more in REPRESENTATIONS.items()
        if (name, key) in LIMITS
    }
    tallies = {key: Tally() for key in candidates}
    num_groups = len(exact.runner.kv_groups())
    for step, batch in enumerate(batches(tokens, EVERY[name], num_groups)):
        logits = exact.logits(batch)
        wanted = logits, log_softmax(logits)
        for key, candidate in candidates.items():
            if key != "reference bf16" or step * CHUNK < REFERENCE_TOKENS:
                tallies[key].add(wanted, candidate.logits(batch))
    for key, candidate in candidates.items():
        candidate.runner.close()
        divergence = np.concatenate(tallies[key].divergence)
        share = tallies[key].num_equal / len(divergence)
        seen = f"{divergence.mean():.6f}, {100 * share:.2f} % of {len(divergence)}"
        most, least = LIMITS[name, key]
        assert divergence.mean() < most and share > least, f"{name}, {key}: {seen}"
