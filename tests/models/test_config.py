"""Hyper-parameters from config.json and from GGUF metadata, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelConfig, config_from_json
from headrace.models.config_gguf import config_from_gguf
from headrace.models.rope import RopeConfig
from headrace.testing.gguf_files import tiny_gguf_tensors, tiny_metadata
from headrace.testing.tiny_models import TINY_ARCHITECTURES, tiny_config

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _hf(model_type: str = "llama", **changes: Any) -> ModelConfig:
    table = tiny_config(model_type, changes)
    return config_from_json({key: value for key, value in table.items() if value is not ...})


def _gguf(
    changes: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    factors: tuple[float, ...] = (),
) -> ModelConfig:
    table = tiny_config(model_type)
    metadata = {**tiny_metadata(model_type, table), **(changes or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    names = tiny_gguf_tensors(model_type, table)
    return config_from_gguf(metadata, names.__contains__, factors)


@pytest.mark.parametrize("model_type", TINY_ARCHITECTURES)
def test_both_sources_say_the_same(model_type: str) -> None:
    left, right = _hf(model_type), _gguf(model_type=model_type)
    for name in ModelConfig.__dataclass_fields__:
        if name in ("raw", "eos_token_ids"):
            continue
        a, b = getattr(left, name), getattr(right, name)
        assert a == (pytest.approx(b) if isinstance(a, float) else b), name


def test_oracle_reads_the_same_rope_frequencies() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for parameters in (LLAMA3, {"rope_type": "linear", "factor": 4.0}):
        full = {**parameters, "rope_theta": 500_000.0}
        oracle = LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters=full,
        )
        function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        expected, scale = function(oracle, torch.device("cpu"))
        config = _hf(
            hidden_size=512,
            head_dim=128,
            max_position_embeddings=131072,
            rope_theta=500_000.0,
            rope_scaling=parameters,
        )
        np.testing.assert_allclose(config.rope.inverse_frequencies(), expected.numpy(), rtol=1e-6)
        assert scale == 1.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_scaling(key: str) -> None:
    changes: dict[str, Any] = {key: LLAMA3}
    rope = _hf(rope_theta=500_000.0, **changes).rope
    assert (rope.scaling, rope.factor, rope.theta) == ("llama3", 8.0, 500_000.0)


def test_old_spelling_names_the_kind_type() -> None:
    rope = _hf(rope_scaling={"type": "linear", "factor": 2.0}).rope
    np.testing.assert_allclose(
        rope.inverse_frequencies() * 2, RopeConfig(10_000.0, 16).inverse_frequencies()
    )


def test_gguf_factors_divide_frequencies() -> None:
    """Q08: rope_freqs.weight is used, not an unexpected tensor."""
    factors = tuple(float(i) for i in range(1, 9))
    plain, scaled = _gguf().rope, _gguf(factors=factors).rope
    assert scaled.scaling == "factors"
    np.testing.assert_allclose(
        scaled.inverse_frequencies() * np.array(factors), plain.inverse_frequencies()
    )


def test_gguf_factors_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ModelError, match="3 entries, the rotated half-dimension is 8"):
        _gguf(factors=(1.0, 2.0, 3.0))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_unsupported_rope_scaling_is_named(kind: str) -> None:
    with pytest.raises(ModelError, match=f"'{kind}' is not supported; supported are none, linear"):
        _hf(rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(ModelError, match=f"'{kind}' is not supported"):
        _gguf({"llama.rope.scaling.type": kind})


def test_incomplete_rope_scaling_names_what_is_missing() -> None:
    with pytest.raises(ModelError, match="'llama3' lacks 'low_freq_factor'"):
        _hf(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_gemma_layers_and_local_rope() -> None:
    config = _hf(
        "gemma3_text", num_hidden_layers=12, layer_types=None, sliding_window_pattern=6, head_dim=32
    )
    assert config.layer_types[4:7] == (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)
    assert config.layer_types.count(FULL_ATTENTION) == 2
    assert (config.rope_of(0).theta, config.rope_of(5).theta) == (10_000.0, 1_000_000.0)
    assert (config.window_of(0), config.window_of(5)) == (24, None)
    assert config.embed_scale == math.sqrt(64)
    assert config.query_scale == 0.25


def test_gemma_linear_scaling_is_global_only() -> None:
    config = _hf("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert config.rope.factor == 8.0
    assert config.rope_local is not None
    assert config.rope_local.scaling == "none"
    scaled = _gguf(
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}, "gemma3_text"
    )
    assert (scaled.rope, scaled.rope_local) == (config.rope, config.rope_local)


def test_gemma_nested_rope_parameters() -> None:
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = _hf("gemma3_text", rope_parameters=parameters)
    assert (config.rope_theta, config.rope_local_theta) == (5e5, 2e4)


def test_multimodal_gemma_keeps_its_text_model_inside() -> None:
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    data = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]}
    config = config_from_json(data)
    assert config.model_type == "gemma3_text"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings


def test_gemma_27b_scales_queries_by_its_own_rule() -> None:
    changes = {
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.value_length": 128,
    }
    assert _gguf(changes, "gemma3_text").query_scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    ("changes", "window", "sliding"),
    [
        ({"sliding_window": 64}, None, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64, 1),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None, 0),
    ],
)
def test_qwen_slides_only_when_told_to(
    changes: dict[str, Any], window: int | None, sliding: int
) -> None:
    config = _hf("qwen2", **changes)
    assert config.sliding_window == window
    assert config.layer_types.count(SLIDING_ATTENTION) == sliding


def test_mistral_slides_in_every_layer_unless_null() -> None:
    assert set(_hf("mistral").layer_types) == {SLIDING_ATTENTION}
    assert _hf("mistral", sliding_window=None).sliding_window is None


def test_families_differ_where_they_should() -> None:
    assert _hf("qwen2").attention_bias
    assert not _hf("qwen2").attention_output_bias
    assert _hf("qwen3").qk_norm
    assert not _hf("llama").qk_norm
    assert _hf("llama", attention_bias=True).attention_output_bias


def test_defaults_that_files_leave_out() -> None:
    config = _hf(head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., eos_token_id=...)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": ...}, "hidden_size must be a whole number above 0, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0, got 0"),
        ({"vocab_size": "x"}, "vocab_size must be a whole number above 0, got 'x'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000, at most"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method 'gptq', which is not read",
        ),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number of at least 0, got 'x'"),
        ({"rope_theta": [1]}, "rope_theta must be a number of at least 0"),
        ({"rope_theta": math.nan}, "rope_theta must be a number of at least 0, got nan"),
        ({"sliding_window": "4k", "layer_types": ["sliding_attention"] * 2}, "sliding_window must"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'.*silu, gelu_pytorch_tanh"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention"]},
            "names 1 layers, the model has 2",
        ),
        ({"sliding_window": 8, "layer_types": ["conv", "conv"]}, "holds conv; supported are"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        _hf(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": None}, "no general.architecture"),
        ({"general.architecture": "lama"}, "'lama' is not supported. Did you mean 'llama'"),
        ({"llama.block_count": None}, "llama.block_count must be a whole number above 0, got None"),
        ({"llama.attention.value_length": 32}, "keys are 16 wide and values 32"),
        ({"llama.feed_forward_length": np.array([128, 256])}, "differs between layers"),
    ],
)
def test_gguf_metadata_that_cannot_be_served(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        _gguf(changes)


def test_optional_metadata_may_be_absent() -> None:
    needed = (
        "block_count embedding_length feed_forward_length attention.head_count "
        "attention.layer_norm_rms_epsilon attention.head_count_kv"
    ).split()
    table = tiny_config("llama")
    metadata = tiny_metadata("llama", table)
    kept = {"general.architecture", "tokenizer.ggml.tokens", *(f"llama.{name}" for name in needed)}
    stripped = {key: value for key, value in metadata.items() if key in kept}
    config = config_from_gguf(stripped, tiny_gguf_tensors("llama", table).__contains__)
    assert (config.head_dim, config.vocab_size) == (16, table["vocab_size"])
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_per_layer_arrays_of_equal_values_are_one_value() -> None:
    config = _gguf({"llama.attention.head_count_kv": np.array([2, 2])})
    assert config.num_kv_heads == 2


def test_a_config_without_model_type_is_no_language_models() -> None:
    with pytest.raises(ModelError, match="no model_type"):
        config_from_json({"hidden_size": 64})
