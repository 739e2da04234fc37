"""Tiny random checkpoints of every architecture, written in a fraction of a second.

The weights are scaled so that greedy text varies instead of repeating one token (embeddings small
against what the layers add, the last norm large); the tokenizer is a real byte-level BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
BOS, EOS, TURN_START, TURN_END = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL_TOKENS = (BOS, EOS, TURN_START, TURN_END)
_WORDS = (
    "the and ing ion ent her his that with for you are was not have this from they were said "
    "which when will there their can all one out time water mill wheel "
    "system user assistant capital of France Paris is in to it on as be at by hello world"
)
_LAYER = "model.layers.{}."


def write_tiny_checkpoint(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    num_shards: int = 1,
) -> Path:
    """Write a checkpoint of `model_type` into `folder` and return it.

    `config` overrides entries of config.json (also sizes: tensors follow). dtype is float32,
    bfloat16 or float16. More than one shard writes an index too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = tiny_config(model_type, config)
    tensors = tiny_tensors(table, seed)
    _write_tensors(folder, tensors, dtype, num_shards)
    table["dtype"] = dtype
    _write_json(folder / "config.json", table)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": table["bos_token_id"], "eos_token_id": table["eos_token_id"]},
    )
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "add_bos_token": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    return folder


def tiny_config(model_type: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of a config.json: 2 layers, hidden size 64, 4 query and 2 KV heads."""
    vocab = _vocabulary()
    table: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(vocab),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": vocab[BOS],
        "eos_token_id": [vocab[TURN_END], vocab[EOS]],
        "pad_token_id": vocab[EOS],
    }
    if model_type == "mistral":
        table.update(sliding_window=24, tie_word_embeddings=False)
    if model_type == "gemma3_text":
        table.update(
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
            hidden_activation="gelu_pytorch_tanh",
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
        )
    table.update(overrides or {})
    return table


def tiny_tensors(table: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return random weights under their Hugging Face names, shaped by a config.json table."""
    is_gemma = table["model_type"] == "gemma3_text"
    make = _Weights(np.random.default_rng(seed), is_gemma)
    hidden, inner = table["hidden_size"], table["intermediate_size"]
    spread = 0.05 * hidden**-0.5 if is_gemma else 0.05
    tensors = {"model.embed_tokens.weight": make.matrix(table["vocab_size"], hidden, spread)}
    for layer in range(table["num_hidden_layers"]):
        tensors |= _layer_tensors(make, table, _LAYER.format(layer), hidden, inner)
    tensors["model.norm.weight"] = make.norm(hidden) + np.float32(0.3 / spread)
    if not table.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = make.matrix(table["vocab_size"], hidden, spread)
    return tensors


def tiny_tokenizer_json() -> str:
    """Return a byte-level BPE tokenizer.json of a few hundred tokens, special tokens included."""
    vocab = _vocabulary()
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in _SPECIAL_TOKENS
    ]
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", **byte_level},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **byte_level},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocab,
                "merges": [list(pair) for pair in _merges()],
            },
        },
        ensure_ascii=False,
    )


_CLASSES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


class _Weights:
    """Draws weights; Gemma's norms are stored as their distance from 1."""

    def __init__(self, random: np.random.Generator, is_gemma: bool) -> None:
        self._random = random
        self._norm_center = 0.0 if is_gemma else 1.0

    def matrix(self, rows: int, columns: int, spread: float | None = None) -> NDArray[np.float32]:
        scale = columns**-0.5 if spread is None else spread
        return (self._random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def vector(self, size: int) -> NDArray[np.float32]:
        return (self._random.standard_normal(size) * 0.1).astype(np.float32)

    def norm(self, size: int) -> NDArray[np.float32]:
        return (self.vector(size) + np.float32(self._norm_center)).astype(np.float32)


def _layer_tensors(
    make: _Weights, table: Mapping[str, Any], prefix: str, hidden: int, inner: int
) -> dict[str, NDArray[np.float32]]:
    head_dim, model_type = table["head_dim"], table["model_type"]
    q_size = table["num_attention_heads"] * head_dim
    kv_size = table["num_key_value_heads"] * head_dim
    attention = prefix + "self_attn."
    tensors = {
        attention + "q_proj.weight": make.matrix(q_size, hidden),
        attention + "k_proj.weight": make.matrix(kv_size, hidden),
        attention + "v_proj.weight": make.matrix(kv_size, hidden),
        attention + "o_proj.weight": make.matrix(hidden, q_size),
        prefix + "mlp.gate_proj.weight": make.matrix(inner, hidden),
        prefix + "mlp.up_proj.weight": make.matrix(inner, hidden),
        prefix + "mlp.down_proj.weight": make.matrix(hidden, inner),
        prefix + "input_layernorm.weight": make.norm(hidden),
        prefix + "post_attention_layernorm.weight": make.norm(hidden),
    }
    if model_type == "qwen2" or table.get("attention_bias"):
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{attention}{name}_proj.bias"] = make.vector(size)
    if table.get("attention_bias") and model_type != "qwen2":
        tensors[attention + "o_proj.bias"] = make.vector(hidden)
    if model_type in ("qwen3", "gemma3_text"):
        tensors[attention + "q_norm.weight"] = make.norm(head_dim)
        tensors[attention + "k_norm.weight"] = make.norm(head_dim)
    if model_type == "gemma3_text":
        tensors[prefix + "pre_feedforward_layernorm.weight"] = make.norm(hidden)
        tensors[prefix + "post_feedforward_layernorm.weight"] = make.norm(hidden)
    return tensors


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte value, in the order of byte values."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte if byte in printable else next(extra)) for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Merges that build each word, bare and after a space, letter by letter from the left."""
    space = _byte_letters()[ord(" ")]
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS.split():
        for letters in (word, space + word):
            for end in range(1, len(letters)):
                merges.setdefault((letters[:end], letters[end]))
    return list(merges)


def _vocabulary() -> dict[str, int]:
    tokens = [*_SPECIAL_TOKENS, *_byte_letters(), *(left + right for left, right in _merges())]
    return {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def _write_tensors(
    folder: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str, num_shards: int
) -> None:
    stored = {name: _stored(values, dtype) for name, values in tensors.items()}
    if num_shards == 1:
        _write_safetensors(folder / "model.safetensors", stored, dtype)
        return
    names = list(stored)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: stored[name] for name in names[shard::num_shards]}
        _write_safetensors(folder / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return values.astype({"float32": np.float32, "float16": np.float16}[dtype])


def _write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str) -> None:
    """The format itself (length, JSON header, data): NumPy has no bfloat16 to hand to a library."""
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": code,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())
