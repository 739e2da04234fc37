"""Every architecture against transformers in float32, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.backends.cpu.ops import CpuOps
from headrace.errors import ModelError
from headrace.models import BUILTIN
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.tiny_models import TINY_ARCHITECTURES, write_tiny_checkpoint
from headrace.types import EngineSettings

MAX_DIFFERENCE = 1e-4
SETTINGS = EngineSettings(dtype="float32", kv_dtype="float32", num_threads=2)
NUM_TOKENS = 90  # several windows and several blocks, and no multiple of either

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in TINY_ARCHITECTURES},
    "llama, untied head": ("llama", {"tie_word_embeddings": False}),
    "llama, rope scaling of 3.x": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama, linear rope scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama, no grouped heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, head_dim is not hidden / heads": ("llama", {"head_dim": 32}),
    "llama, attention biases": ("llama", {"attention_bias": True}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, tied head": ("mistral", {"tie_word_embeddings": True}),
    "qwen2, untied head": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2, window in upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3, attention biases": ("qwen3", {"attention_bias": True}),
    "gemma3, five local layers": (
        "gemma3_text",
        {"num_hidden_layers": 7, "layer_types": None, "sliding_window_pattern": 6},
    ),
    "gemma3, query scale": ("gemma3_text", {"query_pre_attn_scalar": 40}),
    "gemma3, softcaps": (
        "gemma3_text",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3, scaled global rope": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}


def tokens_of(vocab_size: int, count: int = NUM_TOKENS) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, vocab_size, count)]


def oracle_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # Gemma 3 of transformers knows the attention's soft cap but forgets to hand it on.
    cap = getattr(model.config, "attn_logit_softcapping", None)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([list(token_ids)]), softcap=cap).logits
    return np.asarray(logits[0].numpy())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_position(variant: str, tmp_path: Path) -> None:
    name, overrides = VARIANTS[variant]
    folder = write_tiny_checkpoint(tmp_path, name, config=overrides)
    model = open_checkpoint(folder)
    token_ids = tokens_of(model.architecture.vocab_size)
    expected = oracle_logits(folder, token_ids)
    for ops in (NumpyOps(), CpuOps(SETTINGS)):
        driver = ModelDriver(ops, model)
        assert np.abs(driver.logits(token_ids) - expected).max() <= MAX_DIFFERENCE
        chunked = driver.logits(token_ids, [1, 31, 16, 41, 1])
        assert np.abs(chunked - expected).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("model_type", TINY_ARCHITECTURES)
def test_any_chunking_moves_a_logit_by_its_last_bits_only(model_type: str, tmp_path: Path) -> None:
    """Without `deterministic`: within 1e-4 of the largest logit, whatever the chunks."""
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, model_type))
    token_ids = tokens_of(model.architecture.vocab_size)
    whole = ModelDriver(CpuOps(SETTINGS), model).logits(token_ids)
    for chunk in (1, 3, 7, 16):
        sizes = [chunk] * (len(token_ids) // chunk) + [len(token_ids) % chunk]
        cut = ModelDriver(CpuOps(SETTINGS), model).logits(token_ids, [n for n in sizes if n])
        assert np.abs(cut - whole).max() <= 1e-4 * np.abs(whole).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_halves_are_read_exactly(dtype: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "gemma3_text", dtype=dtype)
    model = open_checkpoint(folder)
    token_ids = tokens_of(model.architecture.vocab_size, 20)
    logits = ModelDriver(NumpyOps(), model).logits(token_ids)
    assert np.abs(logits - oracle_logits(folder, token_ids)).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_greedy_text_equals_transformers_and_is_the_same_in_a_batch(
    name: str, tmp_path: Path
) -> None:
    folder = write_tiny_checkpoint(tmp_path, name)
    model = open_checkpoint(folder)
    driver = ModelDriver(NumpyOps(), model)
    prompts = [tokens_of(model.architecture.vocab_size, n) for n in (1, 17, 40)]
    texts = driver.greedy(prompts, 24)
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(set(text)) > 3
        rows = oracle_logits(folder, [*prompt, *text])[len(prompt) - 1 : -1]
        assert rows.argmax(axis=1).tolist() == text
        assert driver.greedy([prompt], 24)[0] == text


def test_every_built_in_serves_the_model_type_it_is_listed_under(tmp_path: Path) -> None:
    for name in BUILTIN:
        architecture = open_checkpoint(write_tiny_checkpoint(tmp_path / name, name)).architecture
        assert architecture.name == name and architecture.query_heads() == 4


def test_layers_with_a_window_are_a_kv_group_of_their_own(tmp_path: Path) -> None:
    gemma = open_checkpoint(write_tiny_checkpoint(tmp_path / "gemma", "gemma3_text"))
    windowed, full = gemma.architecture.kv_groups()
    assert (windowed.layers, windowed.sliding_window, windowed.name) == ((0,), 24, "window_24")
    assert (full.layers, full.sliding_window, full.name) == ((1,), None, "full")
    assert (full.num_kv_heads, full.head_dim) == (2, 16)
    llama = open_checkpoint(write_tiny_checkpoint(tmp_path / "llama", "llama"))
    (only,) = llama.architecture.kv_groups()
    assert only.layers == (0, 1) and only.sliding_window is None


def test_an_untied_head_that_is_absent_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "llama", config={"tie_word_embeddings": True})
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        ModelDriver(NumpyOps(), open_checkpoint(folder))


def test_a_tied_head_is_the_embedding_even_where_a_head_is_stored(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "llama", config={"tie_word_embeddings": False})
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    model = open_checkpoint(folder)
    token_ids = tokens_of(model.architecture.vocab_size, 10)
    logits = ModelDriver(NumpyOps(), model).logits(token_ids)
    assert np.abs(logits - oracle_logits(folder, token_ids)).max() <= MAX_DIFFERENCE
