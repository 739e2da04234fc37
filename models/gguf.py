"""Reads the header of a GGUF file: metadata and where each tensor lies, over one memory map.

Arrays are not decoded until asked for, because a vocabulary of 262,144 tokens is most of a header;
every length is checked against the file's size before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.gguf_types import BLOCK_FORMATS

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAY_DTYPES: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_KEY_BYTES = 65_535
_MIN_KEY_VALUE_BYTES = 8 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 4 + 8
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry: `shape` is [out, in] (GGUF writes it the other way round)."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""


class StringArray(Sequence[str]):
    """An array of strings, decoded at the first look."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data = data
        self._start = start
        self._count = count
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def _decoded(self) -> list[str]:
        if self._strings is None:
            data, position, strings = self._data, self._start, []
            for _ in range(self._count):
                (length,) = _U64.unpack_from(data, position)
                position += 8
                strings.append(data[position : position + length].decode("utf-8", "replace"))
                position += length
            self._strings = strings
        return self._strings


class GGUFFile:
    """One opened GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map_file(path)
        cursor = _Cursor(path, self._data)
        num_tensors, num_key_values = cursor.prologue()
        self.metadata: Mapping[str, Any] = _read_metadata(cursor, num_key_values)
        self.tensors: Mapping[str, TensorInfo] = _read_tensor_infos(
            cursor, num_tensors, _alignment(path, self.metadata)
        )
        self.header_bytes = cursor.position
        """Bytes before the tensor data: everything that says what the file holds."""

    @property
    def size(self) -> int:
        return len(self._data)

    def header(self) -> bytes:
        """Return the bytes of metadata and tensor entries, for a digest."""
        return self._data[: self.header_bytes]

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Return a tensor's stored bytes as a view of the map: [rows, bytes_per_row] u1."""
        block_format = BLOCK_FORMATS[info.type_number]
        rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        row_bytes = info.shape[-1] // block_format.block_size * block_format.block_bytes
        view = np.frombuffer(self._data, dtype=np.uint8, count=rows * row_bytes, offset=info.offset)
        return view.reshape(rows, row_bytes)


class _Cursor:
    """Reads forward through the header and refuses to pass the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.size = len(data)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. Fetch the file again")

    def need(self, num_bytes: int, what: str) -> None:
        left = self.size - self.position
        if num_bytes > left:
            raise self.fail(
                f"the file is truncated or damaged: {what} needs {num_bytes:,} bytes at offset "
                f"{self.position:,}, {left:,} are left"
            )

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def name(self, what: str) -> str:
        length = self.scalar(_U64, what)
        if length > _MAX_KEY_BYTES:
            raise self.fail(
                f"{what} is {length:,} bytes long, at most {_MAX_KEY_BYTES:,} make sense"
            )
        return self._text(length, what)

    def string(self, what: str) -> str:
        return self._text(self.scalar(_U64, what), what)

    def _text(self, length: int, what: str) -> str:
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", "replace")

    def prologue(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and of metadata entries."""
        self.position = 4
        version = self.scalar(_U32, "the version")
        if version in (0x02000000, 0x03000000):
            raise ModelError(
                f"{self.path}: the file is big-endian; only little-endian GGUF is read"
            )
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3. "
                "Convert the model again with a current llama.cpp"
            )
        num_tensors = self.scalar(_U64, "the number of tensors")
        num_key_values = self.scalar(_U64, "the number of metadata entries")
        needed = num_tensors * _MIN_TENSOR_INFO_BYTES + num_key_values * _MIN_KEY_VALUE_BYTES
        if needed > self.size - self.position:
            raise self.fail(
                f"the header claims {num_tensors:,} tensors and {num_key_values:,} metadata "
                f"entries, more than a file of {self.size:,} bytes can hold"
            )
        return num_tensors, num_key_values

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise self.fail(f"metadata entry {key} has the unknown value type {kind}")

    def _array(self, key: str, depth: int = 1) -> Any:
        """Return a StringArray, a view of plain numbers, or a list of such."""
        kind = self.scalar(_U32, key)
        count = self.scalar(_U64, key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            self.need(count * 12, key)
            if depth == _MAX_ARRAY_DEPTH:
                raise self.fail(f"metadata array {key} is nested too deeply")
            return [self._array(key, depth + 1) for _ in range(count)]
        if kind not in _ARRAY_DTYPES:
            raise self.fail(f"metadata array {key} has the unknown element type {kind}")
        dtype = np.dtype(_ARRAY_DTYPES[kind])
        self.need(count * dtype.itemsize, key)
        values = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.position)
        self.position += values.nbytes
        return values

    def _strings(self, count: int, key: str) -> StringArray:
        self.need(count * 8, key)
        start = position = self.position
        data, last_length = self.data, self.size - 8
        unpack = _U64.unpack_from
        for _ in range(count):
            if position > last_length:
                break
            position += 8 + unpack(data, position)[0]
        else:
            if position <= self.size:
                self.position = position
                return StringArray(data, start, count)
        raise self.fail(f"the file is truncated or damaged inside the string array {key}")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            start = file.read(64)
            if start[:4] == b"GGUF":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise ModelError(f"{path}: not a GGUF file: {describe_wrong_file(start)}")


def describe_wrong_file(start: bytes) -> str:
    """Say what a file that should hold weights looks like, from its first bytes."""
    text = start.lstrip().lower()
    if not start:
        return "the file is empty. Fetch it again"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is an HTML page, probably an error page saved under this name. Fetch it again"
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, not the weights. Run `git lfs pull` where it came from"
    if start.startswith((b"ggml", b"ggjt", b"ggla", b"lmgg", b"tjgg")):
        return "it is a GGML file from before GGUF. Convert the model again with llama.cpp"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive (or a wheel). Extract the weights from it"
    if text.startswith(b"{"):
        return "it is a JSON text. Name the file that holds the weights"
    return f"it starts with {start[:8]!r} instead of b'GGUF'. Name a GGUF file"


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name(f"the key of metadata entry {index}")
        if key in metadata:
            raise cursor.fail(f"metadata entry {key} occurs twice")
        kind = cursor.scalar(_U32, key)
        metadata[key] = cursor.value(kind, key)
    return metadata


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment must be a power of two, got {alignment!r}")
    return alignment


def _read_tensor_infos(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        num_dimensions = cursor.scalar(_U32, name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise cursor.fail(
                f"tensor {name} claims {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are possible"
            )
        shape = tuple(cursor.scalar(_U64, name) for _ in range(num_dimensions))[::-1]
        type_number = cursor.scalar(_U32, name)
        offset = cursor.scalar(_U64, name)
        if name in entries:
            raise cursor.fail(f"tensor {name} occurs twice")
        entries[name] = TensorInfo(name, type_number, shape, offset)
    start = -(-cursor.position // alignment) * alignment
    return _placed(cursor, entries, start, alignment)


def _placed(
    cursor: _Cursor, entries: Mapping[str, TensorInfo], start: int, alignment: int
) -> dict[str, TensorInfo]:
    """Turn offsets into positions in the file, and check that no tensor leaves it or another."""
    placed: dict[str, TensorInfo] = {}
    previous_end, previous_name = start, ""
    for entry in sorted(entries.values(), key=lambda info: info.offset):
        if entry.offset % alignment:
            raise cursor.fail(
                f"tensor {entry.name} starts at {entry.offset:,}, not a multiple of {alignment}"
            )
        begin = start + entry.offset
        if begin < previous_end:
            raise cursor.fail(f"tensors {previous_name} and {entry.name} overlap")
        end = begin + _stored_bytes(cursor, entry)
        if end > cursor.size:
            raise cursor.fail(
                f"the file is truncated or damaged: tensor {entry.name} reaches to byte {end:,}, "
                f"the file has {cursor.size:,}"
            )
        placed[entry.name] = TensorInfo(entry.name, entry.type_number, entry.shape, begin)
        previous_end, previous_name = end, entry.name
    return {name: placed[name] for name in entries}


def _stored_bytes(cursor: _Cursor, info: TensorInfo) -> int:
    """How many bytes a tensor takes; 0 for types Headrace cannot size."""
    elements = 1
    for dimension in info.shape:
        if dimension == 0:
            raise cursor.fail(f"tensor {info.name} has the shape {list(info.shape)}")
        elements *= dimension
    block_format = BLOCK_FORMATS.get(info.type_number)
    if block_format is None:
        return 0
    if info.shape[-1] % block_format.block_size:
        raise cursor.fail(
            f"tensor {info.name} has rows of {info.shape[-1]} elements, which type "
            f"{block_format.scheme.upper()} cannot store (blocks of {block_format.block_size})"
        )
    return elements // block_format.block_size * block_format.block_bytes
