"""Best tokens without logits: the same as with them, whatever the weights, the rows and who shares the work."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fast_beside_oracle import BLOCKS, VOCAB, input_rows, product_model, random_blocks, settings_for

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.kernels_tiles import FORMS_WITH_ROOM
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.small_models import bf16_exact
from headrace.types import TokenMasks, WeightPart

RANDOM = np.random.default_rng(23)
WIDTH = 224
pytestmark = pytest.mark.skipif(not FORMS_WITH_ROOM, reason="this level writes logits always")


def batch_of(num_rows: int, temperature: float = 0.0) -> Any:
    tokens = (np.arange(num_rows) % VOCAB).tolist()
    step = SequenceStep(tokens, 0, range(BLOCKS), range(num_rows))
    sampling = sampling_batch(num_rows, {"temperature": [temperature] * num_rows})
    return forward_batch([step], block_size=16, sampling=sampling)


class Compared:
    """A runner that gives the best tokens of a batch, and its logits."""

    def __init__(self, model: LoadedModel, activations: str, num_threads: int) -> None:
        settings = msgspec.structs.replace(settings_for(num_threads), activations=activations)
        self.runner = FastRunner(model, SingleRank(), settings)
        self.runner.allocate(BLOCKS)

    def check(self, num_rows: int) -> Any:
        """The tokens are those of the logits' first largest; a row whose logits hold NaN fails."""
        handle = self.runner.execute(batch_of(num_rows))
        assert self.runner._steps[1].parameters[at.PICKED] != 0
        handle.sample()
        result = handle.result()
        logits = self.runner.last_logits()
        broken = ~np.isfinite(logits).all(axis=1)
        np.testing.assert_array_equal(result.failed, broken)
        best = np.where(broken, 0, np.nan_to_num(logits).argmax(axis=1))
        np.testing.assert_array_equal(np.where(broken, 0, result.token_ids), best)
        return logits


@pytest.mark.parametrize("activations", ["mixed", "precise", "int8"])
@pytest.mark.parametrize("outputs", [16, 1000])
def test_the_best_tokens_are_those_of_the_logits(outputs: int, activations: str) -> None:
    rows = input_rows(WIDTH)
    rows[:, :32] *= 20
    model = product_model([random_blocks("q8_0", outputs, WIDTH)], rows)
    for num_threads in (1, 2, 3):
        compared = Compared(model, activations, num_threads)
        for num_rows in (1, 7, 8, 13, 130):
            compared.check(num_rows)
        compared.runner.close()


def near_ties(outputs: int) -> WeightPart:
    """Outputs that differ in a code or two, and pairs that do not differ at all."""
    part = random_blocks("q8_0", 1, WIDTH)
    data = np.repeat(part.data, outputs, axis=0)
    for output in range(0, outputs, 3):
        data[output, 2 + output % 32] += 1
    return WeightPart("weight", "q8_0", (outputs, WIDTH), data)


@pytest.mark.parametrize("activations", ["mixed", "precise"])
def test_near_ties_are_decided_as_with_logits(activations: str) -> None:
    compared = Compared(product_model([near_ties(500)], input_rows(WIDTH)), activations, 2)
    logits = compared.check(VOCAB)
    compared.runner.close()
    ties = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1)
    assert (ties > 1).any()


def test_broken_rows_fail_alone() -> None:
    rows = input_rows(WIDTH)
    rows[3, 7], rows[5, 200], rows[9] = np.nan, np.inf, 0
    compared = Compared(product_model([random_blocks("q8_0", 90, WIDTH)], rows), "mixed", 2)
    compared.check(20)
    compared.runner.close()


def test_numbers_too_large_for_a_bound_are_compared_one_by_one() -> None:
    """Three groups cancel exactly: the logits are finite, what bounds them is not."""
    rows = input_rows(128)
    rows[:, :96], rows[:, 96:] = 1e36, rows[:, 96:] * np.float32(1e31)
    part = random_blocks("q8_0", 40, 128)
    blocks = part.data.reshape(-1, 4, 34)
    blocks[:, :3, :2] = np.array([60000.0], np.float16).view(np.uint8)
    blocks[:, :3, 2:] = np.tile(np.array([127, 129], np.uint8), 16)
    for activations in ("mixed", "precise", "int8"):
        compared = Compared(product_model([part], bf16_exact(rows)), activations, 2)
        assert np.isfinite(compared.check(20)).all()
        compared.runner.close()


def test_a_head_with_a_bias_gives_logits() -> None:
    bias = np.full(90, 1e10, np.float32)
    compared = Compared(
        product_model([random_blocks("q8_0", 90, WIDTH)], input_rows(WIDTH), bias), "mixed", 1
    )
    compared.runner.execute(batch_of(3))
    assert compared.runner._steps[1].parameters[at.PICKED] == 0
    compared.runner.close()


def test_outputs_that_fill_no_column_hide_no_negative_logits() -> None:
    """Those that are held behind the last one have weights of zero."""
    rows = bf16_exact(np.abs(input_rows(WIDTH)))
    part = random_blocks("q8_0", 19, WIDTH)
    part.data[:] = np.where(np.arange(part.data.shape[1]) % 34 < 2, part.data, 0x81)
    blocks = part.data.reshape(-1, 34)
    blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    compared = Compared(product_model([part], rows), "mixed", 2)
    logits = compared.check(9)
    assert (logits < 0).all()
    compared.runner.close()


def test_who_wants_more_than_the_best_gets_logits() -> None:
    model = product_model([random_blocks("q8_0", 90, WIDTH)], input_rows(WIDTH))
    compared = Compared(model, "mixed", 2)
    runner = compared.runner
    logits = compared.check(6)
    handle = runner.execute(batch_of(6, temperature=0.7))
    assert runner._steps[1].parameters[at.PICKED] == 0
    handle.sample()
    best = int(logits[2].argmax())
    bits = np.full((1, 3), -1, np.int32)
    bits[0, best // 32] &= np.int32(~np.uint32(1 << best % 32).astype(np.int32))
    handle = runner.execute(batch_of(6))
    handle.sample(TokenMasks(np.array([2], np.int32), bits))
    masked = np.delete(logits[2], best).argmax()
    tokens = handle.result().token_ids
    assert tokens[2] == masked + (masked >= best)
    np.testing.assert_array_equal(np.delete(tokens, 2), np.delete(logits.argmax(axis=1), 2))
    runner.close()


def test_a_step_beside_its_caller_finds_them_too() -> None:
    compared = Compared(
        product_model([random_blocks("q8_0", 90, WIDTH)], input_rows(WIDTH)), "mixed", 2
    )
    expected = compared.check(20).argmax(axis=1)
    for _ in range(20):
        handle = compared.runner.execute_beside(batch_of(20))
        np.testing.assert_array_equal(handle.result().token_ids, expected)
    compared.runner.close()
