"""Headrace: a serving system for large language models whose every decision can be swapped.

Public names resolve on first use, so that importing the package loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.plugins.hookspecs import hookimpl
    from headrace.types import SamplingParams

_HOMES = {
    "LLM": "headrace.llm",
    "SamplingParams": "headrace.types",
    "hookimpl": "headrace.plugins.hookspecs",
}

__all__ = ["LLM", "SamplingParams", "hookimpl"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
