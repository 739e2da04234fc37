"""Tokenizers built from GGUF metadata, against transformers' own on a generated mixed corpus."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, pre_tokenizers

from headrace.errors import ModelError
from headrace.models.gguf import GGUFFile
from headrace.models.pre_tokenizers import PRE_TOKENIZERS
from headrace.models.tokenizer_from_gguf import (
    adds_bos,
    build_tokenizer_json,
    tokenizer_json_of,
)
from headrace.testing.gguf_files import tiny_metadata, write_gguf, write_tiny_gguf
from headrace.testing.tiny_models import tiny_config, tiny_tokenizer_json

_WORDS = (
    "the The water's naïve DON'T I'll we've résumé straße Ünïcödé Привет мир שלום مرحبا नमस्ते สวัสดี "
    "日本語のテキスト 漢字 你好，世界 안녕하세요 𝔘𝔫𝔦 ﬁnance １２３ ½ ² Ⅷ 3.14 1,000,000 007 e=mc² x1y2 "
    "snake_case camelCase HTTPServer https://a.b/c?d=e&f=1 a@b.cd #tag $5.00 50% -- … — “quoted” ‘x’"
).split()
_CODE = (
    "def f(x: int = 10) -> list[int]:",
    "    return [i ** 2 for i in range(100)]",
    "\tif (a[i] <= 0x1F && !done) { i += 1; } // note",
    "SELECT * FROM t WHERE id IN (1, 22, 333);",
    '<div class="a">&nbsp;<b>x</b></div>',
    "#include <stdio.h>\r\nint main(void){return 0;}\r\n",
    "x = {'k': [1, 2,  3], \"q\": None}",
    "        100,\n        200,\n",
    "git commit -m 'fix: #123' && echo $HOME",
)
_EMOJI = "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇫🇷 🎉🎉🎉 ☃ ™ ©".split()
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    " \n ",
    "\t\t",
    "     ",
)
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<end_of_turn>",
    "<0x0A>",
    "[multimodal]",
    "▁",
    "</s>",
)


def mixed_corpus(num_lines: int = 2000, seed: int = 11) -> list[str]:
    """Lines of words, code, emoji, CJK, odd spaces, special tokens and random code points."""
    rng = random.Random(seed)
    lines = ["", " ", "\n", "a", " a", "  1", *_CODE, *_SPACES, *_SPECIAL]
    while len(lines) < num_lines:
        parts = []
        for _ in range(rng.randint(1, 14)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(_WORDS))
            elif kind < 0.6:
                parts.append(rng.choice(_CODE))
            elif kind < 0.7:
                parts.append(rng.choice(_EMOJI))
            elif kind < 0.75:
                parts.append(rng.choice(_SPECIAL))
            elif kind < 0.85:
                parts.append(str(rng.randint(0, 10**9)))
            else:
                parts.append("".join(_random_character(rng) for _ in range(rng.randint(1, 6))))
            parts.append(rng.choice(_SPACES) if rng.random() < 0.6 else rng.choice(("", " ")))
        lines.append("".join(parts))
    return lines


def _random_character(rng: random.Random) -> str:
    start, end = rng.choice(
        [(32, 127), (0xA0, 0x250), (0x370, 0x600), (0x3040, 0x3100), (0x4E00, 0x9FFF)]
    )
    return chr(rng.randrange(start, end))


def _oracle(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend: Tokenizer = loaded.backend_tokenizer
    return backend


def _ours(path: Path) -> Tokenizer:
    return Tokenizer.from_str(build_tokenizer_json(GGUFFile(path).metadata))


def _differing(ours: Tokenizer, oracle: Tokenizer, lines: list[str]) -> list[str]:
    left = ours.encode_batch(lines, add_special_tokens=False)
    right = oracle.encode_batch(lines, add_special_tokens=False)
    return [line for line, a, b in zip(lines, left, right, strict=True) if a.ids != b.ids]


def _decoding_differs(ours: Tokenizer, oracle: Tokenizer, lines: list[str]) -> list[str]:
    ids = [encoding.ids for encoding in ours.encode_batch(lines, add_special_tokens=False)]
    left = ours.decode_batch(ids, skip_special_tokens=False)
    right = oracle.decode_batch(ids, skip_special_tokens=False)
    return [line for line, a, b in zip(lines, left, right, strict=True) if a != b]


def _digit_split_shows(line: str) -> bool:
    """Whether cutting single numbers out first could change the pieces of a line."""
    other_numbers = any(not c.isascii() and unicodedata.category(c)[0] == "N" for c in line)
    return other_numbers or re.search(r"\s\s[0-9]", line) is not None


@pytest.fixture(scope="module")
def gemma3_tokenizer(gemma3_gguf: Path) -> Tokenizer:
    return _ours(gemma3_gguf)


def test_gemma_equals_the_oracle(gemma3_gguf: Path, gemma3_tokenizer: Tokenizer) -> None:
    ours, oracle = gemma3_tokenizer, _oracle(gemma3_gguf)
    lines = mixed_corpus()
    assert len(lines) == 2000
    assert _differing(ours, oracle, lines) == []
    assert _decoding_differs(ours, oracle, lines) == []


def test_smollm_equals_the_oracle(smollm2_gguf: Path) -> None:
    """transformers does not know the file's pre-tokenizer 'smollm' and splits as for GPT-2.

    SmolLM's own tokenizer.json (and llama.cpp) cut out single digits first, which shows where two or
    more spaces stand before a number. So the oracle is compared as it is on lines without that, and on
    all lines with the split that the file names.
    """
    ours, oracle = _ours(smollm2_gguf), _oracle(smollm2_gguf)
    lines = mixed_corpus()
    plain = [line for line in lines if not _digit_split_shows(line)]
    assert len(plain) > 800
    assert _differing(ours, oracle, plain) == []
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    assert _differing(ours, oracle, lines) == []
    assert _decoding_differs(ours, oracle, lines) == []


def test_smollm_cuts_digits_before_spaces(smollm2_gguf: Path) -> None:
    tokens = _ours(smollm2_gguf).encode("x =  10", add_special_tokens=False).tokens
    assert tokens == ["x", "Ġ=", "ĠĠ", "1", "0"]


# --- byte-level BPE -------------------------------------------------------------


def _tiny(**changes: Any) -> dict[str, Any]:
    entries = {**tiny_metadata("llama", tiny_config("llama")), **changes}
    arrays = {k: np.asarray(v) if "token_type" in k else v for k, v in entries.items()}
    return {key: value for key, value in arrays.items() if value is not None}


def test_tiny_model_round_trip_equals_its_tokenizer_json() -> None:
    ours = Tokenizer.from_str(build_tokenizer_json(_tiny()))
    original = Tokenizer.from_str(tiny_tokenizer_json())
    lines = mixed_corpus(200)
    assert _differing(ours, original, lines) == []
    assert ours.encode("<|im_start|>user").ids[0] == original.token_to_id("<|im_start|>")


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "it's  12345\n\n x", ["it", "'s", " ", " 12345", "\n\n", " x"]),
        ("smollm", "a  12\n7", ["a", "  ", "1", "2", "\n", "7"]),
        (
            "llama-bpe",
            "it'S 12345\n\n x(y)",
            ["it", "'S", " ", "123", "45", "\n\n", " x", "(y", ")"],
        ),
        ("qwen2", "ab 123!!\n\nz", ["ab", " ", "1", "2", "3", "!!\n\n", "z"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(name: str, text: str, pieces: list[str]) -> None:
    steps = json.dumps(PRE_TOKENIZERS[name].steps())
    shell = json.loads(tiny_tokenizer_json())
    shell["pre_tokenizer"] = json.loads(steps)
    split = Tokenizer.from_str(json.dumps(shell)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("name", [None, "never-heard-of"])
def test_missing_or_unknown_pre_tokenizer_warns(name: str | None) -> None:
    """Q11: an old file without the key is said to be one."""
    with capture_logs() as logs:
        built = json.loads(build_tokenizer_json(_tiny(**{"tokenizer.ggml.pre": name}), "m.gguf"))
    assert [entry["event"] for entry in logs] == ["pre_tokenizer_unknown"]
    assert logs[0]["file"] == "m.gguf"
    assert (name or "has no tokenizer.ggml.pre") in logs[0]["problem"]
    assert built["pre_tokenizer"]["type"] == "ByteLevel"


def test_known_pre_tokenizers_do_not_warn() -> None:
    for name in PRE_TOKENIZERS:
        with capture_logs() as logs:
            Tokenizer.from_str(build_tokenizer_json(_tiny(**{"tokenizer.ggml.pre": name})))
        assert logs == []


def test_llama3_takes_whole_words_without_merges() -> None:
    built = json.loads(build_tokenizer_json(_tiny(**{"tokenizer.ggml.pre": "llama-bpe"})))
    assert built["model"]["ignore_merges"] is True


def test_user_defined_tokens_stay_whole_but_are_not_special() -> None:
    metadata = _tiny()
    types = metadata["tokenizer.ggml.token_type"].copy()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[-1], types[-1] = "<think>", 4
    metadata.update({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:-1]
    tokenizer = Tokenizer.from_str(build_tokenizer_json(metadata))
    ids = tokenizer.encode("a<think>b").ids
    assert ids[1] == len(tokens) - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "None; supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["zzz qqq"]}, "merge 'zzz qqq' names pieces"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "must have one number for each"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "scores must have one"),
    ],
)
def test_unusable_metadata_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build_tokenizer_json(_tiny(**changes))


# --- SentencePiece --------------------------------------------------------------

_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_LEARNED = ["▁t", "he", "▁the", "in", "▁w", "at", "▁wat", "er", "▁water", "ing"]
_LETTERS = [*"▁theinwargsock.,"]


def _sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = [*_PIECES, *_LEARNED, *_LETTERS]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(_LEARNED) + len(_LETTERS))]
    ranks = [0.0] * len(_PIECES) + [-float(rank) for rank in range(len(tokens) - len(_PIECES))]
    entries = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(ranks, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }
    return {key: value for key, value in entries.items() if value is not None}


def _merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's BPE in a few lines: join the neighbours whose piece scores best, leftmost first."""
    rank = dict(zip(tokens, scores, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (rank[a + b], -i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in rank
        ]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_merges_recovered_from_scores_give_sentencepieces_own_pieces() -> None:
    metadata = _sentencepiece()
    tokenizer = Tokenizer.from_str(build_tokenizer_json(metadata))
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice("the in water ing sock. , ") for _ in range(rng.randint(1, 30)))
        expected = _merged_by_score(
            " " + text,
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"].tolist(),
        )
        assert tokenizer.encode(text).tokens == expected


def test_bytes_stand_in_for_characters_the_vocabulary_lacks() -> None:
    tokenizer = Tokenizer.from_str(build_tokenizer_json(_sentencepiece()))
    encoding = tokenizer.encode("the é日")
    assert encoding.tokens[2:] == ["<0xC3>", "<0xA9>", "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.decode(encoding.ids) == "the é日"


@pytest.mark.parametrize("prefix", [True, False, None])
def test_space_prefix_as_the_file_says(prefix: bool | None) -> None:
    metadata = _sentencepiece(**{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = Tokenizer.from_str(build_tokenizer_json(metadata))
    encoding = tokenizer.encode("the water")
    first = "▁the" if prefix is not False else "t"
    assert encoding.tokens[0] == first
    assert tokenizer.decode(encoding.ids) == "the water"


def test_gemma_writes_runs_of_spaces_as_tokens(gemma3_tokenizer: Tokenizer) -> None:
    tokens = gemma3_tokenizer.encode("a    b", add_special_tokens=False).tokens
    assert tokens == ["a", "▁▁▁▁", "b"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.model": "llama"}, False),
        ({"tokenizer.ggml.add_bos_token": None}, False),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, True),
    ],
)
def test_adds_bos(changes: dict[str, Any], expected: bool) -> None:
    assert adds_bos(_tiny(**changes)) is expected


# --- the cache ------------------------------------------------------------------


def test_cache_is_used_and_keyed_by_the_metadata(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf"))
    built = tokenizer_json_of(file, cache)
    (stored,) = cache.glob("tokenizers/*/tokenizer.json")
    assert stored.read_text(encoding="utf-8") == built
    stored.write_text("from the cache", encoding="utf-8")
    assert tokenizer_json_of(file, cache) == "from the cache"
    other = _tiny(**{"tokenizer.ggml.pre": "smollm"})
    changed = GGUFFile(write_gguf(tmp_path / "n.gguf", other, {}))
    assert "Digits" in tokenizer_json_of(changed, cache)


def test_a_cache_that_cannot_be_written_is_only_slower(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf"))
    with capture_logs() as logs:
        built = tokenizer_json_of(file, tmp_path / "cache")
    assert json.loads(built)["model"]["type"] == "BPE"
    assert [entry["event"] for entry in logs] == ["tokenizer_not_cached"]
