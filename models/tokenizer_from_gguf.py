"""Builds a tokenizer.json from GGUF metadata: byte-level BPE and SentencePiece vocabularies.

A SentencePiece file lists pieces and scores but no merges. They are recovered: every cut of a piece
into two others is a merge, ranked by the piece's score (Gemma: by its place in the list, because its
scores do not follow the order in which pieces were learned).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cache import write_atomically
from headrace.errors import ModelError
from headrace.logs import get_logger
from headrace.models.gguf import GGUFFile
from headrace.models.pre_tokenizers import GPT2, PRE_TOKENIZERS, PreTokenizer

_BUILDER_VERSION = b"1"
CONTROL_TYPE, USER_DEFINED_TYPE = 3, 4
"""Values of tokenizer.ggml.token_type."""

_SPACE = "\u2581"
_KNOWN_MODELS = ("gpt2", "llama")


def tokenizer_json_of(file: GGUFFile, cache: Path | None) -> str:
    """Return the file's tokenizer as tokenizer.json, from `cache` where it was built before."""
    if cache is None:
        return build_tokenizer_json(file.metadata, str(file.path))
    digest = hashlib.blake2b(_BUILDER_VERSION + file.header(), digest_size=16).hexdigest()
    path = cache / "tokenizers" / digest / "tokenizer.json"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = build_tokenizer_json(file.metadata, str(file.path))
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        get_logger(__name__).warning("tokenizer_not_cached", path=str(path), reason=str(error))
    return text


def build_tokenizer_json(metadata: Mapping[str, Any], where: str = "GGUF file") -> str:
    """Return a tokenizer.json. Raises ModelError where the metadata describes no usable tokenizer."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if str(model) not in _KNOWN_MODELS:
        raise ModelError(
            f"{where}: tokenizer.ggml.model is {model!r}; supported are "
            f"{', '.join(_KNOWN_MODELS)} (byte-level BPE, SentencePiece). Give a tokenizer.json instead"
        )
    if not isinstance(tokens, Sequence) or not tokens:
        raise ModelError(
            f"{where}: the file has no tokenizer.ggml.tokens. Give a tokenizer.json instead"
        )
    if model == "gpt2":
        table = _byte_level(metadata, list(tokens), where)
    else:
        table = _sentencepiece(metadata, list(tokens), where)
    table = {"version": "1.0", "truncation": None, "padding": None, **table}
    return json.dumps(table, ensure_ascii=False, separators=(",", ":"))


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Tell whether raw text gets a BOS token: as the file says, else as its kind of vocabulary does."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    return pre is not None and pre.adds_bos


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, Any]:
    pre = _pre_tokenizer(metadata, where)
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, Sequence):
        raise ModelError(f"{where}: tokenizer.ggml.merges is missing; a BPE vocabulary needs it")
    vocab = _vocabulary(tokens)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "added_tokens": _added_tokens(metadata, tokens, where),
        "normalizer": {"type": "NFC"} if pre.compose else None,
        "pre_tokenizer": pre.steps(),
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab,
            "merges": _stated_merges(merges, vocab, where),
        },
    }


def _pre_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    problem = "has no tokenizer.ggml.pre" if name is None else f"names the unknown '{name}'"
    get_logger(__name__).warning(
        "pre_tokenizer_unknown",
        file=where,
        problem=f"the file {problem}: text is split as for GPT-2, which may not be how the model was "
        "trained; answers may be worse",
        remedy="convert the model again with a current llama.cpp, or give its tokenizer.json",
        known=", ".join(PRE_TOKENIZERS),
    )
    return GPT2


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, Any]:
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    added = _added_tokens(metadata, tokens, where)
    if is_gemma:
        tokens = [_SPACE * len(t) if len(t) > 1 and set(t) == {" "} else t for t in tokens]
    vocab = _vocabulary(tokens)
    added = [token for token in added if token["content"] in vocab]
    merges = metadata.get("tokenizer.ggml.merges")
    if isinstance(merges, Sequence):
        pairs = _stated_merges(merges, vocab, where)
    else:
        pairs = recovered_merges(tokens, vocab, _ranks(metadata, tokens, is_gemma, where))
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}
        if prefix_space
        else replace,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _unknown_token(metadata, tokens),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": pairs,
        },
    }


def _ranks(
    metadata: Mapping[str, Any], tokens: Sequence[str], is_gemma: bool, where: str
) -> Sequence[float]:
    """Each piece's rank: the higher, the earlier it merges."""
    if is_gemma:
        return range(0, -len(tokens), -1)
    return _one_each(metadata, "tokenizer.ggml.scores", tokens, where)


def recovered_merges(
    tokens: Sequence[str], vocab: Mapping[str, int], ranks: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every cut of a piece into two pieces, best-ranked piece first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, rank in zip(tokens, ranks, strict=True):
        cuts = [
            (vocab[left], vocab[right], left, right)
            for left, right in ((token[:end], token[end:]) for end in range(1, len(token)))
            if left in vocab and right in vocab
        ]
        cuts.sort()
        found.extend((rank, len(left), len(right), left, right) for _, _, left, right in cuts)
    found.sort(key=lambda item: item[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _stated_merges(
    merges: Sequence[str], vocab: Mapping[str, int], where: str
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"{where}: merge {merge!r} names pieces that are not in the vocabulary"
            )
        pairs.append((left, right))
    return pairs


def _one_each(
    metadata: Mapping[str, Any], key: str, tokens: Sequence[str], where: str
) -> list[Any]:
    """Return an array of numbers that has one entry per token."""
    values = metadata.get(key)
    if not isinstance(values, np.ndarray) or len(values) != len(tokens):
        raise ModelError(
            f"{where}: {key} must have one number for each of the {len(tokens)} tokens, got "
            f"{'nothing' if values is None else f'{len(values)} entries'}"
        )
    listed: list[Any] = values.tolist()
    return listed


def _added_tokens(
    metadata: Mapping[str, Any], tokens: Sequence[str], where: str
) -> list[dict[str, Any]]:
    """Tokens taken whole wherever they stand in the text: control tokens and the user's own."""
    if "tokenizer.ggml.token_type" not in metadata:
        return []
    types = _one_each(metadata, "tokenizer.ggml.token_type", tokens, where)
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL_TYPE,
        }
        for token_id, kind in enumerate(types)
        if kind in (CONTROL_TYPE, USER_DEFINED_TYPE) and tokens[token_id]
    ]


def _unknown_token(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str | None:
    token_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return tokens[token_id] if isinstance(token_id, int) and token_id < len(tokens) else None
