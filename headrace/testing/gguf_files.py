"""Writes small GGUF files for tests: any metadata, any tensors, and tiny models as llama.cpp stores them.

Values are written with the type their Python type implies (int: u32, float: f32), which is what real
files use for nearly everything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.testing.tiny_models import tiny_config, tiny_tensors, tiny_tokenizer_json

ALIGNMENT = 32
_ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_LAYER_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor given as its type number, its shape [out, in] and its stored bytes."""

    type_number: int
    shape: tuple[int, ...]
    data: bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any] | RawTensor],
    *,
    version: int = 3,
) -> Path:
    """Write a GGUF file; arrays become F32, F16, or BF16 (u2 bits). Returns `path`."""
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}
    header = struct.pack("<4sIQQ", b"GGUF", version, len(raw), len(metadata))
    header += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    body = b""
    for name, tensor in raw.items():
        header += _text(name) + struct.pack("<I", len(tensor.shape))
        header += b"".join(struct.pack("<Q", dimension) for dimension in reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.type_number, len(body))
        body += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT) + body)
    return path


def write_tiny_gguf(
    path: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model that `write_tiny_checkpoint` writes with the same arguments, as F32 GGUF.

    `metadata` overrides entries; None removes one.
    """
    table = tiny_config(model_type, config)
    entries = {**tiny_metadata(model_type, table), **(metadata or {})}
    return write_gguf(
        path,
        {key: value for key, value in entries.items() if value is not None},
        tiny_gguf_tensors(model_type, table, seed),
    )


def tiny_metadata(model_type: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return GGUF metadata for a config.json table of tiny_config, the tokenizer included."""
    architecture = _ARCHITECTURES[model_type]
    tokenizer = json.loads(tiny_tokenizer_json())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = list(tokenizer["model"]["vocab"])
    entries: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": table["num_hidden_layers"],
        f"{architecture}.context_length": table["max_position_embeddings"],
        f"{architecture}.embedding_length": table["hidden_size"],
        f"{architecture}.feed_forward_length": table["intermediate_size"],
        f"{architecture}.attention.head_count": table["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": table["num_key_value_heads"],
        f"{architecture}.attention.key_length": table["head_dim"],
        f"{architecture}.attention.value_length": table["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": table["rms_norm_eps"],
        f"{architecture}.rope.freq_base": table["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(
            [3 if token_id in special else 1 for token_id in range(len(tokens))], dtype=np.int32
        ),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": table["bos_token_id"],
        "tokenizer.ggml.eos_token_id": table["eos_token_id"][0],
        "tokenizer.ggml.add_bos_token": False,
    }
    if "sliding_window" in table:
        entries[f"{architecture}.attention.sliding_window"] = table["sliding_window"]
    if model_type == "gemma3_text":
        entries[f"{architecture}.attention.sliding_window_pattern"] = 2
    return entries


def tiny_gguf_tensors(
    model_type: str, table: Mapping[str, Any], seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Return tiny_tensors under GGUF's names: Llama's q and k interleaved, Gemma's norms plus 1."""
    is_gemma = model_type == "gemma3_text"
    names = {**_LAYER_NAMES, **(_GEMMA_NAMES if is_gemma else {})}
    heads = {"q_proj": table["num_attention_heads"], "k_proj": table["num_key_value_heads"]}
    stored: dict[str, NDArray[np.float32]] = {}
    for name, values in tiny_tensors(table, seed).items():
        if is_gemma and name.endswith("norm.weight"):
            values = values + np.float32(1)
        for projection, num_heads in heads.items():
            if _ARCHITECTURES[model_type] == "llama" and f".{projection}." in name:
                values = _interleaved(values, num_heads)
        stored[_gguf_name(name, names)] = values
    return stored


def _gguf_name(name: str, names: Mapping[str, str]) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[module]}.{kind}"


def _interleaved(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows as llama.cpp's converter orders them: each head's two halves alternate."""
    shape = values.shape
    halves = values.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)


def _raw(tensor: NDArray[Any] | RawTensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return tensor
    number = {"float32": 0, "float16": 1, "uint16": 30}[tensor.dtype.name]
    return RawTensor(number, tensor.shape, np.ascontiguousarray(tensor).tobytes())


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    kind, data = _encoded(value)
    return struct.pack("<I", kind) + data


def _encoded(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, np.ndarray):
        kind = {"int32": 5, "uint32": 4, "float32": 6, "bool": 7, "int64": 11}[value.dtype.name]
        return 9, struct.pack("<IQ", kind, value.size) + value.tobytes()
    if isinstance(value, Sequence):
        kinds = {_encoded(item)[0] for item in value} or {4}
        data = b"".join(_encoded(item)[1] for item in value)
        return 9, struct.pack("<IQ", kinds.pop(), len(value)) + data
    raise TypeError(f"no GGUF type for {type(value).__name__}")
