"""Safetensors checkpoints: one file, shards, bfloat16 as bits, and every damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.errors import ModelError
from headrace.models.dequantize import expand
from headrace.models.safetensors_source import SafetensorsFile, SafetensorsSource
from headrace.testing.tiny_models import tiny_config, tiny_tensors, write_tiny_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("dtype", "scheme"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_tensors_come_out_as_stored(
    tmp_path: Path, num_shards: int, dtype: str, scheme: str
) -> None:
    folder = write_tiny_checkpoint(tmp_path, dtype=dtype, num_shards=num_shards)
    source = SafetensorsSource(folder)
    expected = tiny_tensors(tiny_config("llama"))
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        part = source.read(name)
        assert source.scheme(name) == (scheme, values.shape)
        assert not part.data.flags.owndata
        tolerance = 0 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(expand(part).data, values, rtol=tolerance)


def test_files_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.ones(1, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path)
    assert source.scheme("a") == ("f16", (2, 3))
    assert source.read("a").data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_gemma_norms_come_out_as_used(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "gemma3_text", dtype="bfloat16")
    stored, used = SafetensorsSource(folder), SafetensorsSource(folder, norms_add_one=True)
    for name in stored.names():
        plain = expand(stored.read(name)).data
        if name.endswith("norm.weight"):
            assert used.scheme(name) == ("f32", plain.shape)
            np.testing.assert_array_equal(used.read(name).data, plain + np.float32(1))
        else:
            np.testing.assert_array_equal(expand(used.read(name)).data, plain)
    assert any(name.endswith("q_norm.weight") for name in stored.names())


def test_multimodal_prefixes_are_stripped(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.norm.weight": np.ones(2, np.float32),
        "language_model.lm_head.weight": np.ones(2, np.float32),
        "vision_tower.x": np.ones(2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.has("model.norm.weight")
    assert source.has("lm_head.weight")


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model-00002-of-00003\.safetensors, model-00003-of-00003"
    ):
        SafetensorsSource(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', "{}"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not a safetensors index"):
        SafetensorsSource(tmp_path)


def test_folders_without_usable_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors weights"):
        SafetensorsSource(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.ones(1, np.float32)}, tmp_path / name)
    with pytest.raises(ModelError, match=r"a\.safetensors, b\.safetensors but no"):
        SafetensorsSource(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert SafetensorsSource(tmp_path).has("x")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>" + b"x" * 80, "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 80, "git-lfs pointer"),
        ((2**60).to_bytes(8, "little") + b"{}" + b" " * 80, "truncated or damaged"),
        ((10).to_bytes(8, "little") + b'{"a": nope' + b" " * 80, "header is damaged"),
        ((2).to_bytes(8, "little") + b"{]" + b" " * 80, "header is damaged"),
    ],
)
def test_wrong_and_damaged_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}, "lies in bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "lies in bytes"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "needs 12 bytes, 8 are stored"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, "needs 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "overlap"),
        ({"dtype": "F32", "shape": [1]}, "header is damaged"),
        ({"dtype": "F32", "shape": "x", "data_offsets": [8, 12]}, "header is damaged"),
    ],
)
def test_damaged_entries(tmp_path: Path, entry: dict[str, object], says: str) -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": good, "b": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(ModelError, match=says):
        SafetensorsFile(path)


def test_unsupported_dtype_is_named_when_asked_for(tmp_path: Path) -> None:
    save_file(
        {"x": np.ones(4, np.int8), UP: np.ones(4, np.float32)}, tmp_path / "model.safetensors"
    )
    source = SafetensorsSource(tmp_path)
    assert source.has(UP)
    with pytest.raises(ModelError, match="tensor x has the type I8.*F32, F16, BF16"):
        source.read("x")
    with pytest.raises(ModelError, match="no tensor y"):
        source.scheme("y")
