"""A file whose tensors differ in type, as every real K-quant file's do, served as the numbers it stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

from headrace.backends.cpu.ops import CpuOps
from headrace.models.gguf_types import FORMAT_OF_SCHEME
from headrace.testing.gguf_files import (
    RawTensor,
    tiny_gguf_tensors,
    tiny_metadata,
    write_gguf,
    write_tiny_gguf,
)
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.tiny_models import tiny_config, write_tiny_checkpoint
from headrace.types import EngineSettings

SETTINGS = EngineSettings(dtype="float32", kv_dtype="float32", num_threads=2)
SIZES = {"hidden_size": 96, "intermediate_size": 256}
"""Only rows of 256 take a K type; 96 is a multiple of 32 alone, as SmolLM2's 576 is."""
TYPES: Mapping[str, str] = {
    "token_embd.weight": "Q8_0",
    "blk.0.attn_q.weight": "Q5_0",
    "blk.0.attn_k.weight": "Q4_1",
    "blk.0.attn_v.weight": "BF16",
    "blk.0.attn_output.weight": "Q5_1",
    "blk.0.ffn_gate.weight": "Q4_0",
    "blk.0.ffn_down.weight": "Q6_K",
    "blk.1.attn_q.weight": "Q4_0",
    "blk.1.attn_k.weight": "F16",
    "blk.1.ffn_up.weight": "Q8_0",
    "blk.1.ffn_down.weight": "Q4_K",
    "output.weight": "Q5_1",
}
_K_SCALE_BYTES = {"Q6_K": (208,), "Q4_K": (0, 2)}


def stored(name: str, values: np.ndarray[Any, Any]) -> tuple[RawTensor, np.ndarray[Any, Any]]:
    """Return a tensor in its type, and the numbers that it then holds by the reference."""
    kind = gguf.GGMLQuantizationType[TYPES[name]]
    if (
        kind.name in _K_SCALE_BYTES
    ):  # the reference cannot write these: any blocks with small scales
        rows, columns = values.shape
        form = FORMAT_OF_SCHEME[kind.name.lower()]
        random = np.random.default_rng(1)
        blocks = random.integers(0, 256, (rows * columns // 256, form.block_bytes), np.uint8)
        for start in _K_SCALE_BYTES[kind.name]:
            scale = np.array([5e-5], np.float16).view(np.uint8)
            blocks[:, start : start + 2] = scale
        data = blocks.reshape(rows, -1)
    else:
        data = quants.quantize(values, kind)
    raw = RawTensor(int(kind), values.shape, np.ascontiguousarray(data).tobytes())
    return raw, quants.dequantize(data, kind).astype(np.float32)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_each_tensor_is_read_by_its_own_type(
    tmp_path: Path, model_type: str, is_tied: bool
) -> None:
    """Q03, Q05, Q06: logits are those of the plain file with the same numbers, embedding and head too."""
    table = tiny_config(model_type, {**SIZES, "tie_word_embeddings": is_tied})
    plain: dict[str, Any] = dict(tiny_gguf_tensors(model_type, table))
    mixed = dict(plain)
    for name in TYPES:
        if name in plain:
            mixed[name], plain[name] = stored(name, plain[name])
    assert ("output.weight" in mixed) == (not is_tied)
    metadata = tiny_metadata(model_type, table)
    files = [
        write_gguf(tmp_path / f"{which}.gguf", metadata, tensors)
        for which, tensors in (("plain", plain), ("mixed", mixed))
    ]
    expected, model = (open_checkpoint(path) for path in files)
    schemes = {model.tensors.scheme(name)[0] for name in model.tensors.names()}
    assert {"q8_0", "q5_0", "q4_1", "bf16", "q5_1", "q4_0", "q6_k", "q4_k", "f16", "f32"} == schemes
    tokens = np.random.default_rng(1).integers(0, model.architecture.vocab_size, 40).tolist()
    reference = ModelDriver(NumpyOps(), expected).logits(tokens)
    assert np.ptp(reference) > 1
    for ops in (NumpyOps(), CpuOps(SETTINGS)):
        difference = np.abs(ModelDriver(ops, model).logits(tokens) - reference).max()
        assert difference <= 1e-4 * np.abs(reference).max()


def llama3_factors(head_dim: int, rope: Mapping[str, Any], theta: float) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter stores as rope_freqs.weight for these settings. [head_dim / 2] f32"""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope["factor"] + smooth), np.float32)


def test_stored_rope_factors_give_the_logits_of_llama_3s_rule(tmp_path: Path) -> None:
    """Q08: the tensor rope_freqs.weight is used as frequency factors."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "llama", config={"rope_scaling": rope})
    table = tiny_config("llama")
    factors = llama3_factors(table["head_dim"], rope, table["rope_theta"])
    assert len(set(factors.tolist())) == 3  # kept, between, divided
    tensors = {**tiny_gguf_tensors("llama", table), "rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata("llama", table), tensors)
    tokens = np.random.default_rng(1).integers(0, table["vocab_size"], 90).tolist()
    stored, ruled, plain = (
        ModelDriver(NumpyOps(), open_checkpoint(source)).logits(tokens)
        for source in (path, checkpoint, write_tiny_gguf(tmp_path / "plain.gguf"))
    )
    assert np.abs(stored - ruled).max() < 1e-4
    assert np.abs(stored - plain).max() > 1e-2
