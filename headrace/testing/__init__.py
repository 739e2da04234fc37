"""Things shipped for tests, ours and those of plugin authors. Names resolve on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.script_file import write_script
    from headrace.testing.scripted import open_scripted
    from headrace.testing.tokenizers import (
        CHATML_TEMPLATE,
        tiny_special_tokens,
        tiny_tokenizer_json,
    )

_HOMES = {
    "CHATML_TEMPLATE": "headrace.testing.tokenizers",
    "open_scripted": "headrace.testing.scripted",
    "tiny_special_tokens": "headrace.testing.tokenizers",
    "tiny_tokenizer_json": "headrace.testing.tokenizers",
    "write_script": "headrace.testing.script_file",
}

__all__ = [
    "CHATML_TEMPLATE",
    "open_scripted",
    "tiny_special_tokens",
    "tiny_tokenizer_json",
    "write_script",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace.testing' has no attribute {name!r}")
