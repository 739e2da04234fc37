"""Tensors of GGUF files under canonical names: row order, splits, types, rope factors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

from headrace.errors import ModelError
from headrace.models.dequantize import expand
from headrace.models.gguf_source import GGUFSource
from headrace.models.safetensors_source import SafetensorsSource
from headrace.testing.gguf_files import (
    RawTensor,
    tiny_gguf_tensors,
    tiny_metadata,
    write_gguf,
    write_tiny_gguf,
)
from headrace.testing.tiny_models import TINY_ARCHITECTURES, tiny_config, write_tiny_checkpoint


def _opened(path: Path, heads: tuple[int, int] = (4, 2)) -> GGUFSource:
    source = GGUFSource(path)
    source.set_heads(*heads)
    return source


@pytest.mark.parametrize("model_type", TINY_ARCHITECTURES)
def test_every_tensor_equals_the_checkpoints(tmp_path: Path, model_type: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf", model_type)
    expected = SafetensorsSource(folder, norms_add_one=model_type == "gemma3_text")
    actual = _opened(write_tiny_gguf(tmp_path / "m.gguf", model_type))
    assert set(actual.names()) == set(expected.names())
    for name in expected.names():
        left, right = actual.read(name), expected.read(name)
        assert actual.scheme(name) == expected.scheme(name) == (left.scheme, left.shape)
        np.testing.assert_array_equal(left.data, right.data, err_msg=name)


def test_only_the_llama_family_is_reordered_and_by_its_own_head_counts(tmp_path: Path) -> None:
    rows = np.arange(64, dtype=np.float32).reshape(64, 1)
    for architecture, reordered in (("llama", True), ("qwen2", False), ("gemma3", False)):
        path = write_gguf(
            tmp_path / f"{architecture}.gguf",
            {"general.architecture": architecture},
            {"blk.0.attn_q.weight": rows, "blk.0.attn_k.weight": rows[:32]},
        )
        source = _opened(path, (4, 2))
        q = source.read("model.layers.0.self_attn.q_proj.weight").data.ravel()
        k = source.read("model.layers.0.self_attn.k_proj.weight").data.ravel()
        first_head = [*range(0, 16, 2), *range(1, 16, 2)]
        plain = list(range(16))
        assert q[:16].tolist() == (first_head if reordered else plain)
        assert k[16:].tolist() == [16 + row for row in (first_head if reordered else plain)]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_quantized_rows_are_gathered_whole(tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    table = tiny_config("llama")
    plain = tiny_gguf_tensors("llama", table)
    name = "blk.0.attn_q.weight"
    blocks = quants.quantize(plain[name], number)
    tensors: dict[str, Any] = {
        **plain,
        name: RawTensor(int(number), plain[name].shape, blocks.tobytes()),
    }
    source = _opened(write_gguf(tmp_path / "m.gguf", tiny_metadata("llama", table), tensors))
    part = source.read("model.layers.0.self_attn.q_proj.weight")
    assert part.scheme == kind.lower()
    assert part.data.dtype == np.uint8
    dequantized = quants.dequantize(blocks, number)
    halves = dequantized.reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    np.testing.assert_array_equal(expand(part).data, halves)


def test_unmoved_tensors_are_views(tmp_path: Path) -> None:
    source = _opened(write_tiny_gguf(tmp_path / "m.gguf"))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        data = source.read(name).data
        assert np.shares_memory(data, source.read(name).data)
        assert not data.flags.owndata


def test_types_may_differ_per_tensor(tmp_path: Path) -> None:
    table = tiny_config("llama")
    tensors: dict[str, Any] = dict(tiny_gguf_tensors("llama", table))
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"].astype(np.float16)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tiny_metadata("llama", table), tensors))
    assert source.scheme("model.layers.0.mlp.up_proj.weight")[0] == "f16"
    assert source.scheme("model.layers.1.mlp.up_proj.weight")[0] == "f32"


def test_real_mixed_file_names_a_type_for_every_tensor(gemma3_gguf: Path) -> None:
    """Q03: a real file whose rows of 640 take no K type."""
    source = GGUFSource(gemma3_gguf)
    schemes = {source.scheme(name)[0] for name in source.names()}
    assert schemes == {"f32", "q4_k", "q5_0", "q6_k", "q8_0"}


@pytest.mark.parametrize(("number", "name"), [(21, "IQ3_S"), (10, "Q2_K"), (99, "number 99")])
def test_unsupported_type_names_tensor_type_and_supported(
    tmp_path: Path, number: int, name: str
) -> None:
    """Q12: by name, not by number alone, before anything is read."""
    tensors = {"blk.3.ffn_down.weight": RawTensor(number, (4, 256), b"")}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    with pytest.raises(ModelError, match=rf"blk\.3\.ffn_down\.weight has the type {name}.*Q6_K"):
        GGUFSource(path)


def test_tensors_the_model_does_not_have_are_left_alone(tmp_path: Path) -> None:
    tensors = {
        "blk.0.extra.weight": RawTensor(21, (4, 256), b""),
        "v.patch": RawTensor(26, (4,), b""),
    }
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    assert list(GGUFSource(path).names()) == []


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = GGUFSource(write_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.7\.mlp\.up_proj\.weight"):
        source.read("model.layers.7.mlp.up_proj.weight")


def test_rope_factors_are_configuration_not_a_weight(tmp_path: Path) -> None:
    table = tiny_config("llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = {**tiny_gguf_tensors("llama", table), "rope_freqs.weight": factors}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tiny_metadata("llama", table), tensors))
    assert source.rope_factors() == tuple(factors.tolist())
    assert not any("rope" in name for name in source.names())
    assert GGUFSource(write_tiny_gguf(tmp_path / "n.gguf")).rope_factors() == ()


def _write_split(folder: Path, numbers: list[int], count: int = 3) -> None:
    table = tiny_config("llama")
    tensors = list(tiny_gguf_tensors("llama", table).items())
    for number in numbers:
        metadata = {"split.no": number, "split.count": count}
        if number == 0:
            metadata = {**tiny_metadata("llama", table), **metadata}
        name = f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        write_gguf(folder / name, metadata, dict(tensors[number::count]))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_split_model_is_loaded_whole_from_any_part(tmp_path: Path, given: int) -> None:
    """Q13: given by any part."""
    _write_split(tmp_path, [0, 1, 2])
    whole = _opened(write_tiny_gguf(tmp_path / "whole.gguf"))
    split = _opened(tmp_path / f"tiny-{given:05d}-of-00003.gguf")
    assert split.architecture == "llama"
    assert set(split.names()) == set(whole.names())
    for name in whole.names():
        np.testing.assert_array_equal(split.read(name).data, whole.read(name).data)


def test_missing_parts_are_all_named(tmp_path: Path) -> None:
    """Q13: a part that is missing."""
    _write_split(tmp_path, [0], count=3)
    says = re.escape("tiny-00002-of-00003.gguf, tiny-00003-of-00003.gguf")
    with pytest.raises(ModelError, match=says):
        GGUFSource(tmp_path / "tiny-00001-of-00003.gguf")


def test_renamed_parts_are_refused(tmp_path: Path) -> None:
    _write_split(tmp_path, [0, 1, 2])
    (tmp_path / "tiny-00001-of-00003.gguf").rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"not named NAME-00001-of-00003\.gguf"):
        GGUFSource(tmp_path / "model.gguf")
    first, second = tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "tiny-00003-of-00003.gguf"
    (tmp_path / "model.gguf").rename(tmp_path / "tiny-00001-of-00003.gguf")
    first.rename(tmp_path / "swap")
    second.rename(first)
    (tmp_path / "swap").rename(second)
    with pytest.raises(ModelError, match="says it is part 3, its name says 2"):
        GGUFSource(tmp_path / "tiny-00001-of-00003.gguf")
