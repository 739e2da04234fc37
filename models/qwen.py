"""Qwen2 and 2.5 (a bias on queries, keys and values) and Qwen3 (query and key norms instead).

Reference: `models/qwen2` and `models/qwen3` of transformers; both differences are in the configuration.
"""

from __future__ import annotations

from typing import ClassVar

from headrace.models.decoder import DecoderArchitecture


class Qwen2Architecture(DecoderArchitecture):
    name: ClassVar[str] = "qwen2"


class Qwen3Architecture(DecoderArchitecture):
    name: ClassVar[str] = "qwen3"
