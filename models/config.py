"""A model's hyper-parameters in one normalized form, whatever file they came from.

Every field holds the value as the forward uses it: defaults that a checkpoint leaves out, and those
that depend on the family, are filled in here and in config_gguf, so architectures never ask twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.errors import ModelError
from headrace.models.rope import RopeConfig, rope_from_parameters

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
HIDDEN_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a decoder-only transformer."""

    model_type: str
    """The family: llama, mistral, qwen2, qwen3, gemma3_text, or a plugin's."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    """Of full-attention layers."""
    rope_local: RopeConfig | None = None
    """Of sliding-window layers where they differ (Gemma 3); None: as `rope`."""
    layer_types: tuple[str, ...] = ()
    """One of FULL_ATTENTION, SLIDING_ATTENTION for each layer; never empty once built."""
    sliding_window: int | None = None
    """Rows a sliding layer sees, itself included. None: no layer slides."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v projections have a bias."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head before rope."""
    hidden_act: str = "silu"
    query_scale: float = 1.0
    """What scores are multiplied by: usually head_dim ** -0.5."""
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The file's own table, for architectures that need more than this."""

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the rope of a layer, local or global."""
        local = self.rope_local is not None and self.layer_types[layer] == SLIDING_ATTENTION
        return self.rope_local if local and self.rope_local is not None else self.rope

    def window_of(self, layer: int) -> int | None:
        """Return how many rows a layer's queries see; None: all before them."""
        return self.sliding_window if self.layer_types[layer] == SLIDING_ATTENTION else None

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @property
    def rope_local_theta(self) -> float:
        return (self.rope_local or self.rope).theta


_GEMMA3_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }
)
"""What Gemma 3's published config.json files leave out."""


MAX_LAYERS = 10_000
"""More layers than any model has: a damaged file, refused before anything is made per layer."""


def _refuse_quantization(table: Any) -> None:
    """Refuse weights packed by a method of their own: their tensors would be misread or not found."""
    if table:
        method = table.get("quant_method", "unnamed") if isinstance(table, Mapping) else table
        raise ModelError(
            f"config.json: quantization_config has quant_method {method!r}, which is not read; "
            "use the model's plain checkpoint, or a GGUF file of it"
        )


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Normalize the contents of a config.json; raises ModelError naming the key that is wrong."""
    table = _text_table(data)
    model_type = str(table.get("model_type") or "")
    if not model_type:
        raise ModelError("config.json has no model_type; it is not a language model's config.json")
    is_gemma = model_type == "gemma3_text"
    if is_gemma:
        table = {**_GEMMA3_DEFAULTS, **table}
    _refuse_quantization(data.get("quantization_config") or table.get("quantization_config"))
    hidden_size = _positive(table, "hidden_size")
    num_layers = _positive(table, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ModelError(
            f"config.json: num_hidden_layers is {num_layers:,}, at most {MAX_LAYERS:,}"
        )
    num_heads = _positive(table, "num_attention_heads")
    num_kv_heads = _positive(table, "num_key_value_heads", num_heads)
    head_dim = _positive(table, "head_dim", hidden_size // num_heads)
    max_position = _positive(table, "max_position_embeddings", 2048)
    layer_types, window = _layer_types(table, model_type, num_layers)
    rope, rope_local = _ropes(table, is_gemma, head_dim, max_position)
    scale_base = _real(table, "query_pre_attn_scalar") or head_dim if is_gemma else head_dim
    output_bias = bool(table.get("attention_bias", False)) and model_type != "qwen2"
    config = ModelConfig(
        model_type=model_type,
        vocab_size=_positive(table, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(table, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_real(table, "rms_norm_eps", 1e-6),
        rope=rope,
        rope_local=rope_local,
        layer_types=layer_types,
        sliding_window=window,
        tie_word_embeddings=bool(table.get("tie_word_embeddings", False)),
        attention_bias=bool(table.get("attention_bias", False)) or model_type == "qwen2",
        attention_output_bias=output_bias,
        mlp_bias=bool(table.get("mlp_bias", False)),
        qk_norm=is_gemma or model_type == "qwen3",
        hidden_act=str(table.get("hidden_activation") or table.get("hidden_act") or "silu"),
        query_scale=1.0 / math.sqrt(scale_base),
        embed_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        attention_softcap=_real(table, "attn_logit_softcapping") or None,
        final_softcap=_real(table, "final_logit_softcapping") or None,
        bos_token_id=first_id(table.get("bos_token_id", data.get("bos_token_id"))),
        eos_token_ids=token_id_tuple(table.get("eos_token_id", data.get("eos_token_id"))),
        raw=MappingProxyType(dict(table)),
    )
    return check_config(config)


def check_config(config: ModelConfig) -> ModelConfig:
    """Return `config`, or raise ModelError where its numbers contradict each other."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads "
            "evenly; the model's config is damaged"
        )
    if len(config.layer_types) != config.num_layers:
        raise ModelError(
            f"layer_types names {len(config.layer_types)} layers, the model has {config.num_layers}"
        )
    unknown = set(config.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown:
        raise ModelError(
            f"layer_types holds {', '.join(sorted(unknown))}; supported are "
            f"{FULL_ATTENTION} and {SLIDING_ATTENTION}"
        )
    if config.hidden_act not in HIDDEN_ACTIVATIONS:
        raise ModelError(
            f"hidden_act '{config.hidden_act}' is not supported; supported are "
            f"{', '.join(HIDDEN_ACTIVATIONS)}"
        )
    factors = len(config.rope.frequency_factors)
    if factors and factors != config.rope.rotary_dim // 2:
        raise ModelError(
            f"rope_freqs.weight has {factors} entries, the rotated half-dimension is "
            f"{config.rope.rotary_dim // 2}"
        )
    return config


def token_id_tuple(value: Any) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id` entry: a number, a list, or null."""
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in values if v is not None and int(v) >= 0)


def first_id(value: Any) -> int | None:
    """Return the first id of such an entry, or None."""
    ids = token_id_tuple(value)
    return ids[0] if ids else None


def sliding_pattern(num_layers: int, pattern: int) -> tuple[str, ...]:
    """Return layer types where every `pattern`-th layer is full and the others slide."""
    return tuple(
        FULL_ATTENTION if (layer + 1) % pattern == 0 else SLIDING_ATTENTION
        for layer in range(num_layers)
    )


def _text_table(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own table: a multimodal Gemma 3 keeps it under text_config."""
    inner = data.get("text_config")
    if isinstance(inner, Mapping) and data.get("model_type") == "gemma3":
        return {**inner, "model_type": "gemma3_text"}
    return data


def _positive(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} must be a whole number above 0, got {value!r}")
    return value


def _real(table: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = table.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ModelError(f"config.json: {key} must be a number of at least 0, got {value!r}")
    return float(value)


def _layer_types(
    table: Mapping[str, Any], model_type: str, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Which layers slide, and their window; (all full, None) where none does."""
    window = table.get("sliding_window")
    if window is None or (
        model_type.startswith("qwen") and not table.get("use_sliding_window", False)
    ):
        return (FULL_ATTENTION,) * num_layers, None
    given = table.get("layer_types")
    if given:
        types = tuple(str(kind) for kind in given)
    elif model_type == "gemma3_text":
        pattern = _positive(table, "_sliding_window_pattern", 6)
        types = sliding_pattern(num_layers, _positive(table, "sliding_window_pattern", pattern))
    elif model_type.startswith("qwen"):
        first = int(_real(table, "max_window_layers", num_layers))
        types = tuple(
            FULL_ATTENTION if layer < first else SLIDING_ATTENTION for layer in range(num_layers)
        )
    elif model_type == "mistral":
        types = (SLIDING_ATTENTION,) * num_layers
    else:
        types = (FULL_ATTENTION,) * num_layers
    return types, _positive(table, "sliding_window") if SLIDING_ATTENTION in types else None


def _ropes(
    table: Mapping[str, Any], is_gemma: bool, head_dim: int, max_position: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of full layers and, for Gemma 3, that of sliding ones. Both spellings of config.json."""
    parameters = table.get("rope_parameters") or table.get("rope_scaling") or {}
    rotary_dim = int(head_dim * (_real(table, "partial_rotary_factor") or 1.0))
    theta = _real(table, "rope_theta") or 10_000.0
    nested = isinstance(parameters.get(FULL_ATTENTION), Mapping)
    full_parameters = parameters[FULL_ATTENTION] if nested else parameters
    full = rope_from_parameters(
        full_parameters, theta=theta, rotary_dim=rotary_dim, max_position=max_position
    )
    if not is_gemma:
        return full, None
    local_parameters = (parameters.get(SLIDING_ATTENTION) or {}) if nested else {}
    local_theta = _real(table, "rope_local_base_freq") or 10_000.0
    local = rope_from_parameters(
        local_parameters, theta=local_theta, rotary_dim=rotary_dim, max_position=max_position
    )
    return full, local
