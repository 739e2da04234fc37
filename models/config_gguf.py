"""ModelConfig from a GGUF file's metadata.

Keys are `<architecture>.<name>`; several that llama.cpp's own loader hard-codes per architecture
(Gemma 3's local rope base and layer pattern) are absent from files and filled in here likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import ModelError, did_you_mean
from headrace.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ModelConfig,
    check_config,
    first_id,
    sliding_pattern,
)
from headrace.models.rope import RopeConfig

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
"""general.architecture of a GGUF file -> model_type of config.json."""


def config_from_gguf(
    metadata: Mapping[str, Any],
    has_tensor: Callable[[str], bool],
    frequency_factors: Sequence[float] = (),
) -> ModelConfig:
    """Normalize GGUF metadata; `has_tensor` tells what the file stores under GGUF's own names."""
    architecture = str(metadata.get("general.architecture") or "")
    if not architecture:
        raise ModelError("the GGUF file has no general.architecture; it holds no language model")
    if architecture not in MODEL_TYPES:
        raise ModelError(
            f"GGUF architecture '{architecture}' is not supported. "
            f"{did_you_mean(architecture, MODEL_TYPES)}"
        )
    keys = _Keys(metadata, architecture)
    is_gemma = architecture == "gemma3"
    hidden_size = keys.number("embedding_length")
    num_layers = keys.number("block_count")
    num_heads = keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", hidden_size // num_heads)
    value_dim = keys.number("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"keys are {head_dim} wide and values {value_dim}; only equal widths are supported"
        )
    layer_types, window = _layer_types(keys, architecture, num_layers)
    rope, rope_local = _ropes(keys, is_gemma, head_dim, tuple(frequency_factors))
    scale_base = hidden_size // num_heads if is_gemma and num_layers == 62 else head_dim
    is_mistral = architecture == "llama" and window is not None
    config = ModelConfig(
        model_type="mistral" if is_mistral else MODEL_TYPES[architecture],
        vocab_size=_vocab_size(keys, metadata),
        hidden_size=hidden_size,
        intermediate_size=keys.number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.number("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=keys.number("context_length", 2048),
        rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        rope_local=rope_local,
        layer_types=layer_types,
        sliding_window=window,
        tie_word_embeddings=not has_tensor("output.weight"),
        attention_bias=has_tensor("blk.0.attn_q.bias"),
        attention_output_bias=has_tensor("blk.0.attn_output.bias"),
        mlp_bias=has_tensor("blk.0.ffn_up.bias"),
        qk_norm=has_tensor("blk.0.attn_q_norm.weight"),
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        query_scale=1.0 / math.sqrt(scale_base),
        embed_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        attention_softcap=keys.optional_real("attn_logit_softcapping"),
        final_softcap=keys.optional_real("final_logit_softcapping"),
        bos_token_id=first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=eos_token_ids(metadata),
        raw={key: value for key, value in metadata.items() if not key.startswith("tokenizer.")},
    )
    return check_config(config)


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every id that ends a turn by the file's own statement: eos, eot and eom."""
    ids: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token_id = first_id(metadata.get(f"tokenizer.ggml.{key}"))
        if token_id is not None and token_id not in ids:
            ids.append(token_id)
    return tuple(ids)


class _Keys:
    """Typed look-up of one architecture's keys."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, name: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}")

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if isinstance(value, np.ndarray):
            value = self._same_in_every_layer(name, value.tolist())
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"GGUF metadata: {self._architecture}.{name} must be a whole number above 0, "
                f"got {value!r}"
            )
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name)
        return default if value is None else float(value)

    def optional_real(self, name: str) -> float | None:
        value = self.get(name)
        return float(value) if value else None

    def _same_in_every_layer(self, name: str, values: Sequence[Any]) -> Any:
        distinct = set(values)
        if len(distinct) != 1:
            raise ModelError(
                f"GGUF metadata: {self._architecture}.{name} differs between layers "
                f"({sorted(distinct)}); only models with equal layers are supported"
            )
        return distinct.pop()


def _vocab_size(keys: _Keys, metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return keys.number("vocab_size", len(tokens) if tokens is not None else None)


def _layer_types(
    keys: _Keys, architecture: str, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    window = keys.get("attention.sliding_window")
    if not window:
        return (FULL_ATTENTION,) * num_layers, None
    if architecture == "gemma3":
        pattern = keys.get("attention.sliding_window_pattern")
        if isinstance(pattern, np.ndarray):
            flags = pattern[:num_layers].tolist()
            types = tuple(SLIDING_ATTENTION if flag else FULL_ATTENTION for flag in flags)
        else:
            types = sliding_pattern(num_layers, int(pattern or 6))
    elif architecture in ("llama", "mistral"):
        types = (SLIDING_ATTENTION,) * num_layers
    else:
        return (FULL_ATTENTION,) * num_layers, None
    return types, int(window)


def _ropes(
    keys: _Keys, is_gemma: bool, head_dim: int, factors: tuple[float, ...]
) -> tuple[RopeConfig, RopeConfig | None]:
    rotary_dim = keys.number("rope.dimension_count", head_dim)
    theta = keys.real("rope.freq_base", 1_000_000.0 if is_gemma else 10_000.0)
    kind = str(keys.get("rope.scaling.type") or "none")
    factor = keys.optional_real("rope.scaling.factor") or keys.optional_real("rope.scale_linear")
    if kind not in ("none", "linear"):
        raise ModelError(
            f"rope scaling '{kind}' is not supported; supported are none, linear and the "
            "factors stored in rope_freqs.weight"
        )
    if factors:
        full = RopeConfig(theta, rotary_dim, scaling="factors", frequency_factors=factors)
    elif factor is not None and factor != 1.0:
        full = RopeConfig(theta, rotary_dim, scaling="linear", factor=factor)
    else:
        full = RopeConfig(theta, rotary_dim)
    if not is_gemma:
        return full, None
    return full, RopeConfig(keys.real("rope.freq_base_swa", 10_000.0), rotary_dim)
