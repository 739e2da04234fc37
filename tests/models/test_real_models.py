"""SmolLM2 and Gemma 3 270M on the CPU backend in float32 against transformers, from GGUF and checkpoint.

transformers reads the GGUF file by its own code, so names, row orders and block formats are checked
as well as the forward.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.backends.cpu.ops import CpuOps
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.text.tokenizer import Tokenizer
from headrace.types import EngineSettings

pytestmark = pytest.mark.real_model

MAX_DIFFERENCE = 2e-3
CONTINUATION = 64
POOL_BLOCKS = 256
SETTINGS = EngineSettings(
    dtype="float32", kv_dtype="float32", num_threads=min(4, len(os.sched_getaffinity(0)))
)

PROMPTS = (
    "The capital of France is",
    "A",
    "Once upon a time, in a mill by the river, there lived",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "SELECT name, COUNT(*) FROM orders WHERE price >= 10.50 GROUP BY",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works":',
    "Die Hauptstadt von Deutschland ist Berlin, und die Hauptstadt von Österreich ist",
    "人工智能的发展历史可以追溯到",
    "今日の天気は晴れです。明日は",
    "Привет, как дела? Сегодня мы поговорим о",
    "مرحبا بالعالم، هذا نص باللغة العربية عن",
    "😀 😃 🚀 👩\u200d👩\u200d👧 emoji are",
    "   leading spaces\t\ttabs\n\n\n   and newlines   \n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "Q: What is 17 * 23?\nA: 17 * 23 =",
    "<|im_start|>user\nName three primes.<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nWrite a haiku about water.<end_of_turn>\n<start_of_turn>model\n",
    "# Title\n\n- first item\n- second item\n\n| a | b |\n|---|---|\n| 1 |",
    "the the the the the the the the the the the the",
    "Ingredients: 2 cups flour, 1 tsp salt, ½ cup water.\n\nStep 1:",
)
LONG_PROMPT = "The water wheel turns and the mill grinds the grain while the river runs on. " * 36
"""Longer than Gemma's window of 512."""
COMPARED_BEHIND_IT = 48

FEW = (0, 3, 7)
"""Prompts that are continued in every run of the tests; the whole set in the slow one."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """One model in its two forms, and the oracle."""

    forms: dict[str, ModelDriver]
    oracle: Any
    tokenizer: Tokenizer

    def oracle_logits(self, token_ids: Sequence[int], skip: int = 0) -> np.ndarray[Any, Any]:
        """Return [T - skip, vocab] f32, the logits behind every token but the first `skip`."""
        tokens = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = self.oracle(tokens, logits_to_keep=len(token_ids) - skip).logits
        return np.asarray(logits[0].numpy())

    def check_logits(self, prompt: str, token_ids: Sequence[int], skip: int = 0) -> None:
        expected = self.oracle_logits(token_ids, skip)
        for form, driver in self.forms.items():
            difference = np.abs(driver.logits(token_ids, skip=skip) - expected).max()
            assert difference <= MAX_DIFFERENCE, f"{form}: {difference} for {prompt[:40]!r}"


@pytest.fixture(scope="module", params=["smollm2_gguf", "gemma3_gguf"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealModel]:
    path: Path = request.getfixturevalue(request.param)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    folder = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(folder)
    model = open_checkpoint(path)
    (folder / "tokenizer.json").write_text(model.text.tokenizer_json)
    tokenizer = Tokenizer(
        model.text.tokenizer_json,
        special_tokens=model.text.special_tokens,
        add_bos_token=model.text.add_bos_token,
    )
    forms = {
        name: ModelDriver(CpuOps(SETTINGS), opened, num_blocks=POOL_BLOCKS)
        for name, opened in (("gguf", model), ("checkpoint", open_checkpoint(folder)))
    }
    yield RealModel(forms, oracle, tokenizer)
    (folder / "model.safetensors").unlink()


def test_logits_equal_transformers_at_every_position(real: RealModel) -> None:
    assert len(PROMPTS) == 20
    for prompt in PROMPTS:
        real.check_logits(prompt, real.tokenizer.encode(prompt))


def test_logits_past_the_window_equal_transformers(real: RealModel) -> None:
    token_ids = real.tokenizer.encode(LONG_PROMPT)
    assert 520 < len(token_ids) < 1024
    real.check_logits(LONG_PROMPT, token_ids, skip=len(token_ids) - COMPARED_BEHIND_IT)


def check_continuations(real: RealModel, indices: Sequence[int]) -> None:
    """Greedy text is identical where each token is the oracle's best behind what precedes it."""
    prompts = [real.tokenizer.encode(PROMPTS[index]) for index in indices]
    texts = real.forms["gguf"].greedy(prompts, CONTINUATION)
    assert real.forms["checkpoint"].greedy(prompts, CONTINUATION) == texts
    for prompt, text in zip(prompts, texts, strict=True):
        rows = real.oracle_logits([*prompt, *text[:-1]], skip=len(prompt) - 1)
        assert rows.argmax(axis=1).tolist() == text


def test_greedy_text_is_identical(real: RealModel) -> None:
    check_continuations(real, FEW)


@pytest.mark.slow
def test_greedy_text_of_every_prompt_is_identical(real: RealModel) -> None:
    check_continuations(real, range(len(PROMPTS)))
