"""What the text layer needs of a checkpoint: tokenizer, chat template, special and end-of-turn tokens.

A model's own files often disagree on which tokens end its answer. Every one that any of them names is
taken, and so is a control token that by its name ends a turn: stopping on too few runs on into a fake
next turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.errors import ModelError
from headrace.interfaces import TextAssets
from headrace.logs import get_logger
from headrace.models.config import token_id_tuple
from headrace.models.config_gguf import eos_token_ids
from headrace.models.tokenizer_from_gguf import CONTROL_TYPE, adds_bos

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
TURN_ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "</s>"),
    )
)
"""Control tokens that end a turn or a document in every model that has them."""

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)


@dataclass(frozen=True, slots=True)
class JsonFiles:
    """The JSON files of a checkpoint folder; empty tables for those it lacks."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    special_tokens: Mapping[str, Any]


def read_json_files(folder: Path) -> JsonFiles:
    """Read them. Raises ModelError where one is no JSON object, or config.json is absent."""
    config = read_json(folder / "config.json")
    if not config:
        raise ModelError(f"{folder}: no config.json; it is not a checkpoint folder")
    return JsonFiles(
        config=config,
        generation=read_json(folder / "generation_config.json"),
        tokenizer_config=read_json(folder / "tokenizer_config.json"),
        special_tokens=read_json(folder / "special_tokens_map.json"),
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Return a JSON object; empty where the file does not exist."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}). Fetch it again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds {type(data).__name__}")
    return data


def assets_of_folder(folder: Path, files: JsonFiles) -> TextAssets:
    """Return what a Hugging Face checkpoint folder says."""
    tokenizer_json, tokenizer = read_tokenizer(folder / "tokenizer.json")
    special_tokens = _special_tokens(files)
    ids = _token_ids(tokenizer)
    ends = [
        *token_id_tuple(files.generation.get("eos_token_id")),
        *token_id_tuple(files.config.get("eos_token_id")),
    ]
    eos = special_tokens.get("eos_token")
    if eos is not None and eos in ids:
        ends.append(ids[eos])
    ends.extend(_turn_ends(tokenizer))
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=warn_without_template(_chat_template(folder, files), str(folder)),
        special_tokens=special_tokens,
        add_bos_token=_adds_bos(files, tokenizer, special_tokens.get("bos_token")),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def assets_of_gguf(metadata: Mapping[str, Any], tokenizer_json: str, where: str) -> TextAssets:
    """Return what a GGUF file's metadata says."""
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    special_tokens: dict[str, str] = {}
    for name, key in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        ids = token_id_tuple(metadata.get(f"tokenizer.ggml.{key}_token_id"))
        if ids and ids[0] < len(tokens):
            special_tokens[name] = tokens[ids[0]]
    template = metadata.get("tokenizer.chat_template")
    kinds = metadata.get("tokenizer.ggml.token_type")
    controls = [] if kinds is None else np.flatnonzero(np.asarray(kinds) == CONTROL_TYPE).tolist()
    ends = [
        *eos_token_ids(metadata),
        *(i for i in controls if i < len(tokens) and tokens[i] in TURN_ENDS),
    ]
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=warn_without_template(template if isinstance(template, str) else None, where),
        special_tokens=special_tokens,
        add_bos_token=adds_bos(metadata),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def sampling_of_folder(files: JsonFiles) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json; none where it asks for greedy text."""
    if files.generation.get("do_sample") is False:
        return {}
    return _numbers({key: files.generation.get(key) for key in _SAMPLING_KEYS})


def sampling_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults a GGUF file carries, if any."""
    return _numbers({name: metadata.get(key) for key, name in _GGUF_SAMPLING.items()})


def read_tokenizer(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return a tokenizer.json as text and as data."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent}: no tokenizer.json; save the tokenizer in that form "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) and put it there"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}). Fetch it again") from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise ModelError(f"{path}: not a tokenizer.json: it has no model")
    return text, data


def warn_without_template(template: str | None, where: str) -> str | None:
    """Return `template`; log once at start-up that chat will be refused where there is none."""
    if template is None or not template.strip():
        get_logger(__name__).warning(
            "no_chat_template",
            file=where,
            effect="chat requests are refused with 400; completions work",
        )
        return None
    return template


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _token_text(value: Any) -> str | None:
    """A special token is stated as its text or as an object that holds it."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _special_tokens(files: JsonFiles) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        for table in (files.tokenizer_config, files.special_tokens):
            text = _token_text(table.get(name))
            if text is not None:
                found[name] = text
                break
    return found


def _token_ids(tokenizer: Mapping[str, Any]) -> Mapping[str, int]:
    ids: dict[str, int] = {}
    vocab = tokenizer["model"].get("vocab")
    if isinstance(vocab, dict):
        ids.update(vocab)
    for token in tokenizer.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids


def _turn_ends(tokenizer: Mapping[str, Any]) -> list[int]:
    return [
        token["id"]
        for token in tokenizer.get("added_tokens") or ()
        if token.get("special") and token["content"] in TURN_ENDS
    ]


def _chat_template(folder: Path, files: JsonFiles) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / 'chat_template.jinja'}: cannot be read ({error})") from error
    template = files.tokenizer_config.get("chat_template")
    if template is None:
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, Sequence) and not isinstance(template, str):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _adds_bos(files: JsonFiles, tokenizer: Mapping[str, Any], bos: str | None) -> bool:
    """As tokenizer_config.json says, else whether the tokenizer's own post-processor adds BOS."""
    stated = files.tokenizer_config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated and bos is not None
    post = tokenizer.get("post_processor") or {}
    for step in (post, *(post.get("processors") or ())):
        for item in step.get("single") or ():
            if bos is not None and item.get("SpecialToken", {}).get("id") == bos:
                return True
    return False
