"""Opens a checkpoint: hyper-parameters, tensors and text assets, with no weight read yet.

The revision is a digest of what the files state and of a sample of every tensor's bytes: cheap enough
for every start, the same on every machine, and different for a fine-tune of the same shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cache import cache_folder
from headrace.errors import ModelError, did_you_mean
from headrace.interfaces import LoadedModel, ModelArchitecture, TensorSource, TextAssets
from headrace.logs import get_logger
from headrace.models.config import ModelConfig, config_from_json
from headrace.models.config_gguf import config_from_gguf
from headrace.models.dequantize import expand
from headrace.models.gguf_source import GGUFSource
from headrace.models.gguf_types import FORMAT_OF_SCHEME
from headrace.models.safetensors_source import SafetensorsSource
from headrace.models.text_assets import (
    assets_of_folder,
    assets_of_gguf,
    read_json_files,
    read_tokenizer,
    sampling_of_folder,
    sampling_of_gguf,
)
from headrace.models.tokenizer_from_gguf import tokenizer_json_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_SAMPLE_BYTES = 64
_DTYPES: Mapping[str, str] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def open_model(
    path: Path,
    *,
    name: str,
    registry_models: Mapping[str, type[ModelArchitecture]],
    tokenizer_path: Path | None = None,
) -> LoadedModel:
    """Open a GGUF file or a checkpoint folder.

    `registry_models` maps model_type to architecture. `tokenizer_path` names a tokenizer.json to use
    instead of a GGUF file's own. Raises ModelError.
    """
    path = checkpoint_path(path)
    if path.is_dir():
        return _open_folder(path, name, registry_models)
    return _open_gguf(path, name, registry_models, tokenizer_path)


def checkpoint_path(path: Path) -> Path:
    """Return the folder or the GGUF file to open: of a folder of GGUF files, its only model."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ModelError(f"model: '{path}' does not exist. Name a GGUF file or a checkpoint folder")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    firsts = [file for file in files if "-of-" not in file.stem or "-00001-of-" in file.stem]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = ", ".join(file.name for file in firsts)
        raise ModelError(f"model: '{path}' holds several GGUF files; name one of {names}")
    if files:
        return files[0]
    raise ModelError(f"model: '{path}' holds neither config.json nor a GGUF file")


def _open_folder(
    folder: Path, name: str, registry_models: Mapping[str, type[ModelArchitecture]]
) -> LoadedModel:
    files = read_json_files(folder)
    config = config_from_json(files.config)
    architecture = _architecture(config, registry_models)
    tensors = SafetensorsSource(folder, norms_add_one=config.model_type == "gemma3_text")
    config = settle_head(config, tensors)
    text = assets_of_folder(folder, files)
    headers = [file.data[: file.header_bytes] for file in tensors.files]
    headers.append(json.dumps(dict(files.config), sort_keys=True).encode())
    return LoadedModel(
        name=name,
        revision=_revision(headers, tensors, text),
        architecture=architecture(config),
        tensors=tensors,
        text=text,
        default_sampling=sampling_of_folder(files),
        stored_dtype=_stored_dtype(tensors),
        expand=expand,
    )


def _open_gguf(
    path: Path,
    name: str,
    registry_models: Mapping[str, type[ModelArchitecture]],
    tokenizer_path: Path | None,
) -> LoadedModel:
    tensors = GGUFSource(path)
    metadata = tensors.metadata
    config = config_from_gguf(metadata, tensors.has_stored, tensors.rope_factors())
    architecture = _architecture(config, registry_models)
    tensors.set_heads(config.num_heads, config.num_kv_heads)
    config = settle_head(config, tensors)
    if tokenizer_path is not None:
        tokenizer_json, _ = read_tokenizer(tokenizer_path)
    else:
        tokenizer_json = tokenizer_json_of(tensors.files[0], cache_folder())
    text = assets_of_gguf(metadata, tokenizer_json, str(path))
    return LoadedModel(
        name=name,
        revision=_revision([file.header() for file in tensors.files], tensors, text),
        architecture=architecture(config),
        tensors=tensors,
        text=text,
        default_sampling=sampling_of_gguf(metadata),
        stored_dtype=_stored_dtype(tensors),
        expand=expand,
    )


def settle_head(config: ModelConfig, tensors: TensorSource) -> ModelConfig:
    """Decide between a tied and a stored output head.

    A stored head is used, also where the config says tied (a fine-tune may have parted them), unless it
    is the embedding's copy. None stored and not tied: refused, never a random head.
    """
    if not tensors.has(HEAD):
        if config.tie_word_embeddings:
            return config
        raise ModelError(
            f"the model has no {HEAD} and its config.json does not set tie_word_embeddings; "
            "the checkpoint is incomplete. Fetch it again"
        )
    if not config.tie_word_embeddings or not tensors.has(EMBEDDING):
        return config
    same = _same_bytes(tensors, EMBEDDING, HEAD)
    if not same:
        get_logger(__name__).warning(
            "head_not_tied",
            detail=f"config says the head is tied, but {HEAD} is stored and differs: it is used",
        )
    return replace(config, tie_word_embeddings=same)


def _same_bytes(tensors: TensorSource, first: str, second: str) -> bool:
    left, right = tensors.read(first), tensors.read(second)
    return (
        left.scheme == right.scheme
        and left.shape == right.shape
        and all(np.array_equal(a, b) for a, b in zip(left.data, right.data, strict=True))
    )


def _architecture(
    config: ModelConfig, registry_models: Mapping[str, type[ModelArchitecture]]
) -> type[ModelArchitecture]:
    try:
        return registry_models[config.model_type]
    except KeyError:
        raise ModelError(
            f"no architecture serves model_type '{config.model_type}'. "
            f"{did_you_mean(config.model_type, registry_models)}"
        ) from None


def _revision(headers: Iterable[bytes], tensors: TensorSource, text: TextAssets) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(len(header).to_bytes(8, "little") + header)
    for name in sorted(tensors.names()):
        digest.update(_sample(tensors, name))
    digest.update(hashlib.blake2b(text.tokenizer_json.encode()).digest())
    return digest.hexdigest()


def _sample(tensors: TensorSource, name: str) -> bytes:
    """The start, middle and end of a tensor's bytes, or all of a short one."""
    try:
        rows: np.ndarray[Any, Any] = tensors.read(name).data
    except ModelError:
        return b""
    if rows.ndim > 1 and rows.shape[0] > 3:
        rows = rows[[0, rows.shape[0] // 2, rows.shape[0] - 1], :_SAMPLE_BYTES]
    return np.ascontiguousarray(rows).tobytes()[: 1 << 16]


def _stored_dtype(tensors: TensorSource) -> str:
    """The dtype most elements of matrices are stored in; block types count as bfloat16."""
    elements: dict[str, int] = {}
    for name in tensors.names():
        try:
            scheme, shape = tensors.scheme(name)
        except ModelError:
            continue
        if len(shape) > 1:
            dtype = _DTYPES[scheme] if FORMAT_OF_SCHEME[scheme].block_size == 1 else "bfloat16"
            elements[dtype] = elements.get(dtype, 0) + int(np.prod(shape, dtype=np.int64))
    return max(elements, key=lambda dtype: elements[dtype], default="float32")
