"""Small tokenizers for tests: byte-level BPE whose first 256 ids are the bytes themselves.

A token id below 256 is that byte, so a test can write any text, and half a character, as plain numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.text.byte_level import BYTE_CHARACTERS, to_characters

SPECIAL_TOKENS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

_WORDS = (
    *(" the", " of", " and", " to", " in", " is", " that", " for", " with", " capital"),
    *("ing", "ed", "er", "tion", "Hello", " world", " France", " Paris", "user", "assistant"),
    *("system", "\n\n", "  ", "def", "return", " é", "你好", "😀"),
)

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template in the form most small models carry."""


def tiny_tokenizer_json() -> str:
    """Return a byte-level BPE tokenizer.json: 256 bytes, some merges, SPECIAL_TOKENS as the last ids."""
    vocabulary = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    merges: list[list[str]] = []
    for word in _WORDS:
        characters = to_characters(word.encode())
        left = characters[0]
        for right in characters[1:]:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append([left, right])
            left += right
    return tokenizer_json(vocabulary, merges, SPECIAL_TOKENS)


def byte_tokenizer_json() -> str:
    """Return a byte-level tokenizer.json without merges: ids 0 to 255 are bytes, then SPECIAL_TOKENS."""
    vocabulary = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    return tokenizer_json(vocabulary, (), SPECIAL_TOKENS)


def tiny_special_tokens() -> dict[str, str]:
    """Return the named special tokens of tiny_tokenizer_json."""
    return {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}


def tokenizer_json(
    vocabulary: dict[str, int], merges: Sequence[Sequence[str]], special: Sequence[str]
) -> str:
    """Return a byte-level BPE tokenizer.json with `special` added behind `vocabulary`."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                _added_token(len(vocabulary) + place, content)
                for place, content in enumerate(special)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocabulary,
                "merges": [list(pair) for pair in merges],
            },
        }
    )


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
