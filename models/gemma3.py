"""Gemma 3 text models: norms before and after attention and MLP, local and global layers.

Reference: `models/gemma3` of transformers (arXiv 2503.19786). Norm weights arrive as used: a checkpoint
that stores their distance from 1 has it added when it is read.
"""

from __future__ import annotations

from typing import ClassVar

from headrace.models.decoder import DecoderArchitecture, NormNames


class Gemma3Architecture(DecoderArchitecture):
    name: ClassVar[str] = "gemma3_text"
    norms: ClassVar[NormNames] = NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
