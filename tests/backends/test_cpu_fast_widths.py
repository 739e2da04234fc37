"""Which groups of activations keep 15 bits: found once, the loudest, the same for every row and every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from fast_beside_oracle import BLOCKS, settings_for
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.cpu.fast.widths import Widths, trial_batch
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.models.dequantize import to_float32
from headrace.testing.small_models import bf16_exact, plain_part, small_model
from headrace.types import WeightPart

GROUPS, OUTPUTS, VOCAB = 16, 48, 50
LOUD = (11, 2, 7, 14)
"""Groups whose numbers are larger than the others', the loudest first."""
RANDOM = np.random.default_rng(11)
MIXED = msgspec.structs.replace(settings_for(), activations="mixed")


def rows_with_loud_groups() -> NDArray[np.float32]:
    rows = RANDOM.standard_normal((VOCAB, GROUPS, 32))
    for rank, group in enumerate(LOUD):
        rows[:, group] *= 60 - 10 * rank
    return bf16_exact(rows.reshape(VOCAB, GROUPS * 32))


def model_of(rows: NDArray[np.float32], weight: WeightPart, *, sampled: bool) -> LoadedModel:
    """embed -> linear, of tokens or, `sampled`, of the rows that are wanted."""

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        return ops.hold([parts["embedding"]]), ops.hold([parts["w"]])

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.embed(weights[0], step)
        if sampled:
            return ops.linear(ops.take_rows(x, step), weights[1])
        return ops.take_rows(ops.linear(x, weights[1]), step)

    parts = {"embedding": plain_part("embedding", rows), "w": weight}
    return small_model(parts, load, forward, width=OUTPUTS)


def q4_0() -> WeightPart:
    blocks = RANDOM.integers(0, 256, (OUTPUTS * GROUPS, 18), np.uint8)
    scales = np.full(OUTPUTS * GROUPS, 0.02, np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return WeightPart("w", "q4_0", (OUTPUTS, GROUPS * 32), blocks.reshape(OUTPUTS, -1))


def computed(
    model: LoadedModel, settings: Any, lengths: Sequence[int]
) -> tuple[NDArray[np.float32], Sequence[Widths]]:
    """Return the logits behind tokens 0, 1, ..., in steps of so many, and the runner's widths."""
    runner = FastRunner(model, SingleRank(), settings)
    try:
        runner.allocate(BLOCKS)
        found, done = [], 0
        for count in lengths:
            tokens = list(range(done, done + count))
            step = SequenceStep(tokens, done, range(BLOCKS), range(count))
            runner.execute(forward_batch([step], block_size=16))
            found.append(runner.last_logits())
            done += count
        return np.concatenate(found), runner._program.widths
    finally:
        runner.close()


@pytest.mark.parametrize(("sampled", "wide"), [(False, LOUD), (True, None)])
def test_the_loudest_groups_are_wide(sampled: bool, wide: Sequence[int] | None) -> None:
    """A quarter of 16 for tokens; for the logits half of them, the loud ones among those."""
    rows, weight = rows_with_loud_groups(), q4_0()
    found, (widths,) = computed(model_of(rows, weight, sampled=sampled), MIXED, [20])
    chosen = set(np.flatnonzero(widths.wide).tolist())
    assert chosen == set(LOUD) if wide else len(chosen) == 8 and chosen > set(LOUD)
    dense = to_float32(weight.scheme, weight.data, weight.shape).astype(np.float64)
    groups = rows[:20].astype(np.float64).reshape(20, GROUPS, 32)
    largest = np.abs(groups).max(axis=2)
    steps = largest / np.where(widths.wide, 2 * 32512, 2 * 127)
    most = np.einsum("rg,ng->rn", steps, np.abs(dense).reshape(OUTPUTS, GROUPS, 32).sum(axis=2))
    apart = np.abs(found - rows[:20].astype(np.float64) @ dense.T)
    assert (apart <= 1.01 * most + 1e-3).all()
    assert (apart > 0.02 * most).any()  # the others do have 8 bits


def test_no_group_and_every_group() -> None:
    rows, weight = rows_with_loud_groups(), q4_0()
    for activations, share in (("precise", 1), ("int8", 0)):
        settings = msgspec.structs.replace(MIXED, activations=activations)
        _, (widths,) = computed(model_of(rows, weight, sampled=False), settings, [3])
        assert (widths.wide == share).all()


def test_neither_batch_nor_runner_changes_a_bit() -> None:
    model = model_of(rows_with_loud_groups(), q4_0(), sampled=False)
    whole, (widths,) = computed(model, MIXED, [37])
    parts, (again,) = computed(model, msgspec.structs.replace(MIXED, num_threads=1), [1, 16, 20])
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(widths.wide, again.wide)


def test_a_share_is_at_least_one_group_and_the_first_of_equal_ones() -> None:
    for groups, expected in ((1, [1]), (2, [1, 0]), (9, [1, 1] + [0] * 7)):
        widths = Widths.of(groups, 0.25)
        assert widths.wide.all()  # until they are chosen
        widths.noise[:] = 3.0
        widths.choose()
        assert widths.wide.tolist() == expected


def test_a_number_that_is_none_does_not_keep_a_model_from_loading() -> None:
    rows = rows_with_loud_groups()
    rows[:, 40] = np.nan
    _, (widths,) = computed(model_of(rows, q4_0(), sampled=False), MIXED, [2])
    assert widths.wide.sum() == 4


@pytest.mark.parametrize(
    ("length", "blocks", "rows"), [(4096, 40, 64), (20, 40, 20), (4096, 1, 16)]
)
def test_the_trial_fits_a_context_and_the_pool(length: int, blocks: int, rows: int) -> None:
    settings = msgspec.structs.replace(MIXED, max_model_len=length)
    batch = trial_batch(settings, VOCAB, blocks, 2)
    assert len(batch.token_ids) == rows and batch.token_ids.max() < VOCAB
    assert batch.slots.max() < blocks * settings.block_size and batch.sample_rows[-1] == rows - 1
