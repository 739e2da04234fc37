"""The tensors of a safetensors checkpoint, one file or sharded, as views of memory maps.

The header is read here rather than by the safetensors library, because NumPy has no bfloat16: such
tensors are views of their bits as u2.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.gguf import describe_wrong_file
from headrace.types import WeightPart

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_DTYPES: Mapping[str, tuple[str, str]] = {
    "F32": ("f32", "<f4"),
    "F16": ("f16", "<f2"),
    "BF16": ("bf16", "<u2"),
}
_NESTED_PREFIXES = ("model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map_file(path)
        self.header_bytes = 8 + int.from_bytes(self.data[:8], "little")
        self.tensors: Mapping[str, StoredTensor] = _parse_header(self)

    def view(self, name: str) -> NDArray[Any]:
        """Return a tensor as a view of the map: its shape, dtype f4, f2 or u2."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name} has the type {stored.dtype}, which is not supported; "
                f"supported are {', '.join(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[stored.dtype][1])
        count = (stored.end - stored.begin) // dtype.itemsize
        flat = np.frombuffer(self.data, dtype=dtype, count=count, offset=stored.begin)
        return flat.reshape(stored.shape)


class SafetensorsSource:
    """A TensorSource over a checkpoint folder.

    `norms_add_one` is for Gemma, which stores the distance of a norm's weight from 1.
    """

    def __init__(self, folder: Path, *, norms_add_one: bool = False) -> None:
        self.files = _open_files(folder)
        self._folder = folder
        self._norms_add_one = norms_add_one
        self._entries = {
            _canonical(name): (file, name) for file in self.files for name in file.tensors
        }

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def has(self, name: str) -> bool:
        return name in self._entries

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        file, stored_name = self._entry(name)
        view = file.view(stored_name)
        return "f32" if self._adds_one(name, view) else _scheme(file, stored_name), view.shape

    def read(self, name: str) -> WeightPart:
        file, stored_name = self._entry(name)
        view = file.view(stored_name)
        scheme = _scheme(file, stored_name)
        if self._adds_one(name, view):
            return WeightPart(name, "f32", view.shape, _to_float32(scheme, view) + np.float32(1))
        return WeightPart(name, scheme, view.shape, view)

    def _adds_one(self, name: str, view: NDArray[Any]) -> bool:
        return self._norms_add_one and view.ndim == 1 and name.endswith("norm.weight")

    def _entry(self, name: str) -> tuple[SafetensorsFile, str]:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(f"{self._folder}: the model has no tensor {name}") from None


def _canonical(name: str) -> str:
    """Strip what multimodal checkpoints put around their language model."""
    for prefix in _NESTED_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _scheme(file: SafetensorsFile, name: str) -> str:
    return _DTYPES[file.tensors[name].dtype][0]


def _to_float32(scheme: str, values: NDArray[Any]) -> NDArray[np.float32]:
    if scheme == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _open_files(folder: Path) -> list[SafetensorsFile]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: not a safetensors index ({error})") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: names a file outside its folder: {outside[0]!r}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder}: files named by {INDEX_NAME} are missing: {', '.join(missing)}"
            )
        return [SafetensorsFile(folder / name) for name in names]
    single = folder / SINGLE_NAME
    if single.is_file():
        return [SafetensorsFile(single)]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return [SafetensorsFile(folder / others[0])]
    if others:
        raise ModelError(
            f"{folder}: holds {', '.join(others)} but no {INDEX_NAME}; fetch the index too"
        )
    raise ModelError(
        f"{folder}: holds no safetensors weights (pickled .bin and .pth files are not read)"
    )


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            start = file.read(64)
            if len(start) >= 10 and start[8:9] == b"{":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise ModelError(f"{path}: not a safetensors file: {describe_wrong_file(start)}")


def _parse_header(file: SafetensorsFile) -> dict[str, StoredTensor]:
    path, size, start = file.path, len(file.data), file.header_bytes
    if start > min(size, _MAX_HEADER_BYTES):
        raise ModelError(
            f"{path}: the file is truncated or damaged: its header claims {start:,} bytes, the file "
            f"has {size:,}. Fetch it again"
        )
    try:
        table = json.loads(file.data[8:start])
        table.pop("__metadata__", None)
        tensors = {name: _stored(entry, start) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path}: the header is damaged ({error}). Fetch the file again"
        ) from error
    end_of_last, last = start, ""
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        _check_tensor(file, name, stored)
        if stored.begin < end_of_last:
            raise ModelError(f"{path}: tensors {last} and {name} overlap. Fetch the file again")
        end_of_last, last = stored.end, name
    return tensors


def _stored(entry: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(dimension) for dimension in entry["shape"])
    return StoredTensor(str(entry["dtype"]), shape, start + int(begin), start + int(end))


def _check_tensor(file: SafetensorsFile, name: str, stored: StoredTensor) -> None:
    path, size = file.path, len(file.data)
    if not file.header_bytes <= stored.begin <= stored.end <= size:
        raise ModelError(
            f"{path}: the file is truncated or damaged: tensor {name} lies in bytes "
            f"{stored.begin:,} to {stored.end:,}, the file has {size:,}. Fetch it again"
        )
    if stored.dtype in _DTYPES:
        needed = np.dtype(_DTYPES[stored.dtype][1]).itemsize
        for dimension in stored.shape:
            needed *= dimension
        if needed != stored.end - stored.begin or min(stored.shape, default=1) < 0:
            raise ModelError(
                f"{path}: tensor {name} of shape {list(stored.shape)} needs {needed:,} bytes, "
                f"{stored.end - stored.begin:,} are stored. Fetch the file again"
            )
