"""Checkpoints in, architectures written on Ops.

`BUILTIN` names every architecture by the `model_type` it serves; nothing is imported until chosen.
"""

from collections.abc import Mapping
from types import MappingProxyType

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "llama": "headrace.models.llama:LlamaArchitecture",
        "mistral": "headrace.models.llama:MistralArchitecture",
        "qwen2": "headrace.models.qwen:Qwen2Architecture",
        "qwen3": "headrace.models.qwen:Qwen3Architecture",
        "gemma3_text": "headrace.models.gemma3:Gemma3Architecture",
    }
)
