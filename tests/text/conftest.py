"""Tokenizers of each kind: byte-level, and SentencePiece with and without its leading space."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.testing import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer

_PIECES = (
    "▁",
    "▁▁",
    "▁the",
    "▁capital",
    "▁of",
    "▁is",
    "the",
    "a",
    "b",
    "c",
    "e",
    "h",
    "t",
    "你",
    "é",
)
_MERGES = (("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"))
_FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]


def sentencepiece_json(*, leading_space: bool) -> str:
    """Return a BPE tokenizer.json with byte fallback, as converted from a SentencePiece model."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, "th"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if leading_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if leading_space else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    data: dict[str, Any] = {
        "version": "1.0",
        "truncation": {
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": pieces[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, *_FALLBACK, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in _MERGES],
        },
    }
    return json.dumps(data)


def _sentencepiece(*, leading_space: bool) -> Tokenizer:
    return Tokenizer(
        sentencepiece_json(leading_space=leading_space),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        add_bos_token=True,
    )


TOKENIZERS = {
    "byte_level": Tokenizer(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=True
    ),
    "sentencepiece": _sentencepiece(leading_space=False),
    "sentencepiece_leading_space": _sentencepiece(leading_space=True),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]
