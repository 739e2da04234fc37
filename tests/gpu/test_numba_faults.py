"""Numba kernels with one barrier, wait or bound taken out: the simulator or the oracle must notice each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from gpu.cases import BF16, FP8, AttentionCase, check_attention
from gpu.numba_simulated import needs_numba_cuda, numba_kernels
from gpu.row_cases import check_draw, check_gate, check_norm, check_quantized_linear

from headrace.backends.batches import sampling_batch
from headrace.backends.gpu.kernels import SILU, Kernels

pytestmark = [needs_numba_cuda, pytest.mark.kernels]
BARRIER = "cuda.syncthreads()"
FOLDER = Path(__file__).parents[2] / "backends" / "cuda_numba" / "kernels"


def attention(kernels: Kernels) -> None:
    case = AttentionCase("faults", ((1, 165), (1, 9)), num_kv_heads=1, blocks_wanted=2)
    check_attention(case, kernels)


def tiles(kernels: Kernels) -> None:
    """Tensor cores, tiles of 8 bits."""
    case = AttentionCase(
        "faults", ((1, 150), (2, 40)), group=2, num_kv_heads=1, stored=FP8, blocks_wanted=1
    )
    check_attention(case, kernels)


def wide_tiles(kernels: Kernels) -> None:
    """Tensor cores, tiles of 16 bits, which are read by lanes that did not copy them."""
    check_attention(AttentionCase("faults", ((1, 70),), group=6, num_kv_heads=1), kernels)


def draw(kernels: Kernels) -> None:
    """Two rows, 300 tokens: top_k, top_p, listed tokens, penalties and a bias."""
    columns: dict[str, list[float]] = {
        "temperature": [3.0, 0.7], "top_k": [5, 0], "top_p": [0.5, 0.8], "num_logprobs": [3, -1],
        "repetition_penalty": [1.3, 1.0], "seeds": [6, 6], "positions": [1, 2],
    }  # fmt: skip
    logits = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    best = int(logits[0].argmax())
    every_token = dict.fromkeys(range(300), 1)
    sampling = sampling_batch(
        2, columns, histories=[every_token, {}], biases=[{best: 0.5, 250: 1.0}, {}]
    )
    check_draw(kernels, logits, sampling)


def norm(kernels: Kernels) -> None:
    check_norm(kernels, BF16, 300)


def gate(kernels: Kernels) -> None:
    check_gate(kernels, BF16, 75, SILU)


def linear(kernels: Kernels) -> None:
    check_quantized_linear(kernels, 8, 1, (7, 96))


CHECKS: Mapping[str, Callable[[Kernels], None]] = {
    check.__name__: check for check in (attention, tiles, wide_tiles, draw, norm, gate, linear)
}
BARRIERS = {
    "attention": "attention",
    "attention_tensor": "tiles",
    "elementwise": "norm",
    "sampling": "draw",
}
"""Module of kernels -> the check that must fail for every barrier it loses."""
WIDENED = "cuda.syncwarp()\n                key_tile"
PLANTED: tuple[tuple[str, str, str, str], ...] = (
    ("attention", "wait_copies(NEWEST)", "wait_copies(STAGES)", "attention"),
    ("attention", "* ROWS_AT_ONCE + place, stop - 1)", "* ROWS_AT_ONCE + place, stop)", "attention"),
    ("attention", "min(at_row + ROWS_AT_ONCE, stop - 1)", "at_row + ROWS_AT_ONCE", "attention"),
    ("attention", "if piece >= counts[0]:", "if False:", "attention"),
    ("attention", "if index >= counts[1]:", "if False:", "attention"),
    ("attention", "if not is_row:", "if False:", "attention"),
    ("attention_tensor", "wait_copies(1)", "wait_copies(2)", "tiles"),
    ("attention_tensor", "cuda.syncwarp()", "pass", "wide_tiles"),
    ("attention_tensor", WIDENED, WIDENED.replace("cuda.syncwarp()", "pass"), "tiles"),
    ("attention_tensor", "or row >= limit", "", "tiles"),
    ("attention_tensor", "if r < num_rows:", "if True:", "tiles"),
    ("elementwise", "if i < size:", "if True:", "gate"),
    ("elementwise", "for shuffle in range(5):", "for shuffle in range(4):", "norm"),
    ("linear", "if output >= num_outputs:", "if False:", "linear"),
    ("sampling", "same and key >= floor", "same", "draw"),
    ("sampling", "if found > score or", "if found < score or", "draw"),
    ("sampling", "if thread % 32 >= 1 << shuffle:", "if True:", "draw"),
)  # fmt: skip
"""Module, text, what takes its place, the check that must fail."""


def barriers() -> list[tuple[str, int]]:
    return [
        (source, index)
        for source in BARRIERS
        for index in range((FOLDER / f"{source}.py").read_text().count(BARRIER))
    ]


@pytest.mark.parametrize("check", CHECKS)
def test_checks_pass_without_a_fault(check: str) -> None:
    CHECKS[check](numba_kernels()[0])


@pytest.mark.parametrize(("source", "index"), barriers())
def test_every_barrier_is_missed(source: str, index: int) -> None:
    from headrace.testing.cuda_numba import changed_module

    kernels, _ = numba_kernels({source: changed_module(source, BARRIER, "pass", index)})
    with pytest.raises(AssertionError):
        CHECKS[BARRIERS[source]](kernels)


@pytest.mark.parametrize(("source", "old", "new", "check"), PLANTED)
def test_every_planted_fault_is_noticed(source: str, old: str, new: str, check: str) -> None:
    from headrace.testing.cuda_numba import changed_module

    kernels, launcher = numba_kernels({source: changed_module(source, old, new)})
    launcher.order = "random"
    with pytest.raises(AssertionError):
        CHECKS[check](kernels)
