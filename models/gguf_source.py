"""The tensors of a GGUF file, or of all parts of a split one, under their canonical names.

llama.cpp stores the query and key rows of the Llama family interleaved for its own rotation; here
they come back in the half-split order, as a gather of whole stored rows, blocks untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.gguf import GGUFFile, TensorInfo
from headrace.models.gguf_names import ROPE_FREQUENCIES, canonical_name
from headrace.models.gguf_types import BLOCK_FORMATS, SUPPORTED_TYPES, type_name
from headrace.types import WeightPart

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_INTERLEAVED_ARCHITECTURES = ("llama", "mistral")
_PLAIN_VIEWS: Mapping[str, str] = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


class GGUFSource:
    """A TensorSource over GGUF files. Raises ModelError at once where a tensor's type is unreadable."""

    def __init__(self, path: Path) -> None:
        self.files = open_parts(path)
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self.architecture = str(self.metadata.get("general.architecture") or "")
        self._entries = _canonical_entries(self.files, self.architecture)
        self._head_counts: Mapping[str, int] = {}

    def set_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """State the head counts; from then on Llama's q and k come out un-interleaved."""
        if self.architecture in _INTERLEAVED_ARCHITECTURES:
            self._head_counts = {"q_proj": num_heads, "k_proj": num_kv_heads}

    def has_stored(self, name: str) -> bool:
        """Tell whether any part holds a tensor under GGUF's own name."""
        return any(name in file.tensors for file in self.files)

    def rope_factors(self) -> tuple[float, ...]:
        """Return the divisors of the rope frequencies; empty where the file has none."""
        for file in self.files:
            info = file.tensors.get(ROPE_FREQUENCIES)
            if info is not None:
                if BLOCK_FORMATS[info.type_number].scheme != "f32":
                    raise ModelError(f"{file.path}: {ROPE_FREQUENCIES} must be stored as F32")
                return tuple(file.raw(info).view("<f4").ravel().tolist())
        return ()

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def has(self, name: str) -> bool:
        return name in self._entries

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        _, info = self._entry(name)
        return BLOCK_FORMATS[info.type_number].scheme, info.shape

    def read(self, name: str) -> WeightPart:
        file, info = self._entry(name)
        scheme = BLOCK_FORMATS[info.type_number].scheme
        data: NDArray[Any] = file.raw(info)
        if scheme in _PLAIN_VIEWS:
            data = data.view(_PLAIN_VIEWS[scheme]).reshape(info.shape)
        num_heads = self._interleaved_heads(name)
        if num_heads:
            data = data[_half_split_order(name, info.shape[0], num_heads)]
        return WeightPart(name, scheme, info.shape, data)

    def _entry(self, name: str) -> tuple[GGUFFile, TensorInfo]:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(f"{self.files[0].path}: the model has no tensor {name}") from None

    def _interleaved_heads(self, name: str) -> int:
        for projection, num_heads in self._head_counts.items():
            if f".self_attn.{projection}." in name:
                return num_heads
        return 0


def open_parts(path: Path) -> list[GGUFFile]:
    """Open a GGUF file and, where it is one part of several, all of them in order."""
    first = GGUFFile(path)
    count = first.metadata.get("split.count")
    if not isinstance(count, int) or count <= 1:
        return [first]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path}: the file is one of {count} parts, but is not named "
            f"NAME-00001-of-{count:05d}.gguf, so the others cannot be found. Restore the names"
        )
    paths = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path}: the model has {count} parts, missing beside it: {', '.join(missing)}"
        )
    files = [first if part == path else GGUFFile(part) for part in paths]
    for number, file in enumerate(files):
        if file.metadata.get("split.no", number) != number:
            raise ModelError(
                f"{file.path}: says it is part {file.metadata['split.no'] + 1}, its name says "
                f"{number + 1}. Restore the names"
            )
    return files


def _canonical_entries(
    files: Iterable[GGUFFile], architecture: str
) -> dict[str, tuple[GGUFFile, TensorInfo]]:
    entries: dict[str, tuple[GGUFFile, TensorInfo]] = {}
    for file in files:
        for stored_name, info in file.tensors.items():
            name = canonical_name(stored_name, architecture)
            if name is None and stored_name != ROPE_FREQUENCIES:
                continue
            if info.type_number not in BLOCK_FORMATS:
                raise ModelError(
                    f"{file.path}: tensor {stored_name} has the type "
                    f"{type_name(info.type_number)}, which is not supported; supported are "
                    f"{SUPPORTED_TYPES}. Use a file quantized to one of them, such as Q4_K_M"
                )
            if name is None:
                continue
            if name in entries:
                raise ModelError(f"{file.path}: tensor {stored_name} is in another part too")
            entries[name] = (file, info)
    return entries


def _half_split_order(name: str, num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """Which stored row holds each row of the half-split layout: [num_rows] i64."""
    if num_rows % (2 * num_heads):
        raise ModelError(f"tensor {name} has {num_rows} rows, not a multiple of {num_heads} heads")
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
