"""How byte-level BPE vocabularies split text before merging, by the name in tokenizer.ggml.pre.

The patterns are those of the models' own tokenizer.json files (llama.cpp's names for them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to split text. Without a pattern GPT-2's own, which the library builds in."""

    pattern: str | None = None
    single_digits: bool = False
    """Every digit by itself, before anything else."""
    whole_words: bool = False
    """A piece that is a token is taken whole, merges or not (`ignore_merges`)."""
    compose: bool = False
    """Unicode NFC first."""
    adds_bos: bool = False
    """What the vocabulary does where the file does not say."""

    def steps(self) -> dict[str, Any]:
        """Return the pre_tokenizer table of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            pattern = {"Regex": self.pattern}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            steps.append(split)
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": self.pattern is None,
            }
        )
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


GPT2 = PreTokenizer()
_DIGITS_FIRST = PreTokenizer(single_digits=True)
_LLAMA3_STYLE = PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_STYLE = PreTokenizer(_QWEN2, compose=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt", "roberta-bpe"), GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_FIRST),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_STYLE),
        **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_STYLE),
        "tekken": PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_GPT4O)),
    }
)
