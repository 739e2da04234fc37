"""GGUF tensor names to the canonical (Hugging Face) ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_GLOBAL: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_IN_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_norm": "post_attention_layernorm",
    }
)
_GEMMA3_IN_LAYER: Mapping[str, str] = MappingProxyType(
    {
        **_IN_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rope frequencies (Llama 3.x): part of the configuration, not a weight."""


def canonical_name(name: str, architecture: str) -> str | None:
    """Return a tensor's canonical name; None where the model has no such weight."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    module = (_GEMMA3_IN_LAYER if architecture == "gemma3" else _IN_LAYER).get(part)
    return f"model.layers.{layer}.{module}.{kind}" if module else None
