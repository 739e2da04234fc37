"""Llama 2 and 3.x, SmolLM2 and their kin, and Mistral with its sliding window.

Reference: `models/llama` and `models/mistral` of transformers; the rope scaling of Llama 3.x and the
window are in the configuration.
"""

from __future__ import annotations

from typing import ClassVar

from headrace.models.decoder import DecoderArchitecture


class LlamaArchitecture(DecoderArchitecture):
    name: ClassVar[str] = "llama"


class MistralArchitecture(DecoderArchitecture):
    name: ClassVar[str] = "mistral"
