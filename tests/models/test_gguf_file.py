"""The header reader: equal to the gguf package on real files, clear about every damaged one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.gguf import GGUFFile, StringArray
from headrace.models.gguf_types import type_name
from headrace.testing.gguf_files import write_gguf, write_tiny_gguf

SMALL = {"general.architecture": "llama", "general.name": "x"}


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(gemma3_gguf)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_header_equals_the_packages_reader(model: str, request: pytest.FixtureRequest) -> None:
    reference = request.getfixturevalue(f"{model}_reference")
    file = GGUFFile(request.getfixturevalue(f"{model}_gguf"))
    fields = {k: v for k, v in reference.fields.items() if not k.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        value = file.metadata[key]
        if isinstance(value, StringArray):
            assert list(value) == field.contents()
        elif isinstance(value, np.ndarray):
            assert value.tolist() == field.contents()
        else:
            assert value == field.contents()
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert type_name(info.type_number) == tensor.tensor_type.name
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert info.offset == tensor.data_offset
        stored = np.asarray(tensor.data).view(np.uint8).ravel()
        assert np.array_equal(file.raw(info).ravel()[:4096], stored[:4096])


def test_raw_is_a_view_of_the_map(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL, {"w": np.ones((4, 8), np.float32)})
    file = GGUFFile(path)
    raw = file.raw(file.tensors["w"])
    assert raw.shape == (4, 32)
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    assert np.shares_memory(raw, file.raw(file.tensors["w"]))


@pytest.mark.parametrize("version", [2, 3])
def test_value_types_round_trip(tmp_path: Path, version: int) -> None:
    metadata = {
        "i": 7,
        "f": 0.5,
        "t": True,
        "s": "é日本",
        "a": np.arange(5, dtype=np.int32),
        "l": ["a", "", "ü"],
        "b": np.array([True, False]),
        "e": [],
    }
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, {}, version=version))
    assert file.metadata["s"] == "é日本"
    assert (file.metadata["i"], file.metadata["f"], file.metadata["t"]) == (7, 0.5, True)
    assert file.metadata["a"].tolist() == [0, 1, 2, 3, 4]
    assert list(file.metadata["l"]) == ["a", "", "ü"]
    assert file.metadata["l"][-1] == "ü"
    assert file.metadata["b"].tolist() == [True, False]
    assert len(file.metadata["e"]) == 0


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>" + b"x" * 99, "HTML page"),
        (b"\n  <html><head>" + b"x" * 99, "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"PK\x03\x04" + b"x" * 99, "zip archive"),
        (b"ggjt" + b"x" * 99, "before GGUF"),
        (b'{"error": "Repository not found"}', "JSON text"),
        (b"\x80\x02ctorch" + b"x" * 99, "starts with"),
    ],
)
def test_wrong_files_are_named_for_what_they_are(tmp_path: Path, start: bytes, says: str) -> None:
    """Q16: a page, a pointer, an archive instead of weights."""
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    with pytest.raises(ModelError, match=says):
        GGUFFile(path)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("version", "says"), [(1, "version 1 is not supported"), (0x03000000, "big-endian")]
)
def test_versions(tmp_path: Path, version: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        GGUFFile(write_gguf(tmp_path / "m.gguf", SMALL, {}, version=version))


def test_every_truncation_is_a_clear_error(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = GGUFFile(tmp_path / "m.gguf").header_bytes
    lengths = [*range(4, 400, 7), *range(400, header, 997), *range(header, len(whole) - 32, 50_021)]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated|damaged|can hold"):
            GGUFFile(cut)


@pytest.mark.parametrize("counts", [(2**63, 1), (1, 2**63), (10**6, 0), (0, 10**6)])
def test_absurd_counts_are_refused_before_anything_is_allocated(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, *counts) + bytes(64))
    with pytest.raises(ModelError, match="more than a file of .* bytes can hold"):
        GGUFFile(path)


@pytest.mark.parametrize("kind", [8, 5, 9])
def test_absurd_array_lengths(tmp_path: Path, kind: int) -> None:
    entry = struct.pack("<Q1sIIQ", 1, b"k", 9, kind, 2**61)
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry + bytes(64))
    with pytest.raises(ModelError, match="truncated or damaged: k needs"):
        GGUFFile(path)


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 5000
    entry = struct.pack("<Q1sI", 1, b"k", 9) + nested
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry)
    with pytest.raises(ModelError, match="nested too deeply"):
        GGUFFile(path)


def _edited(tmp_path: Path, name: str, **fields: Any) -> Path:
    """A file with two F32 tensors whose entry for `name` is replaced field by field."""
    entries: dict[str, dict[str, Any]] = {
        "a": {"dimensions": [8, 4], "type": 0, "offset": 0},
        "b": {"dimensions": [8, 4], "type": 0, "offset": 128},
    }
    entries[name].update(fields)
    header = struct.pack("<4sIQQ", b"GGUF", 3, 2, 0)
    for key, entry in entries.items():
        dimensions = entry["dimensions"]
        header += struct.pack("<Q1sI", 1, key.encode(), len(dimensions))
        header += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        header += struct.pack("<IQ", entry["type"], entry["offset"])
    path = tmp_path / "edited.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(256))
    return path


def test_the_unedited_file_is_read(tmp_path: Path) -> None:
    assert list(GGUFFile(_edited(tmp_path, "b")).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offset": 96}, "tensors a and b overlap"),
        ({"offset": 0}, "overlap"),
        ({"offset": 100}, "not a multiple of 32"),
        ({"offset": 1 << 40}, "tensor b reaches to byte"),
        ({"offset": 160}, "tensor b reaches to byte"),
        ({"dimensions": [2**40, 2**40]}, "tensor b reaches to byte"),
        ({"dimensions": [0, 4]}, r"shape \[4, 0\]"),
        ({"dimensions": [8] * 9}, "9 dimensions"),
        ({"type": 12, "dimensions": [192, 1]}, "rows of 192 elements, which type Q4_K cannot"),
    ],
)
def test_damaged_tensor_entries(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        GGUFFile(_edited(tmp_path, "b", **fields))


def test_doubled_names_are_refused(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", {"k1": 1, "k2": 2}, {}).read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"k2", b"k1"))
    with pytest.raises(ModelError, match="k1 occurs twice"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("alignment", [0, 48])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(ModelError, match="power of two"):
        GGUFFile(write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, {}))


def test_files_of_the_packages_writer_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_block_count(2)
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(6, dtype=np.float16).reshape(3, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "w.gguf")
    assert file.metadata["llama.block_count"] == 2
    assert file.tensors["a"].shape == (2, 3)
    assert file.raw(file.tensors["b"]).view("<f2").tolist() == [[0, 1], [2, 3], [4, 5]]


def test_the_test_writer_is_read_by_the_package(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "gemma3_text")
    reader = gguf.GGUFReader(path)
    assert reader.fields["gemma3.block_count"].contents() == 2
    assert len(reader.tensors) == len(GGUFFile(path).tensors)
