"""How groups of activations are coded: found once, by the loudest inputs, the same for every row and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numba
import numpy as np
import pytest
from fast_beside_oracle import BLOCKS, settings_for
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast import intrinsics
from headrace.backends.cpu.fast.coding_plan import MOST_HALVINGS, CodingPlan, trial_batch
from headrace.backends.cpu.fast.kernels_tiles import BYTES_SIGNED, FORMS_WITH_ROOM, NIBBLES
from headrace.backends.cpu.fast.layout import SAMPLES, TOKENS
from headrace.backends.cpu.fast.runner import FastRunner
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
) -> tuple[NDArray[np.float32], Sequence[CodingPlan]]:
    """Return the logits behind tokens 0, 1, ..., in steps of so many, and the runner's plans."""
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
        return np.concatenate(found), runner._program.plans
    finally:
        runner.close()


def q8_0() -> WeightPart:
    blocks = RANDOM.integers(0, 256, (OUTPUTS * GROUPS, 34), np.uint8)
    blocks[:, :2] = np.full(OUTPUTS * GROUPS, 0.002, np.float16).view(np.uint8).reshape(-1, 2)
    return WeightPart("w", "q8_0", (OUTPUTS, GROUPS * 32), blocks.reshape(OUTPUTS, -1))


def assert_near(
    found: NDArray[np.float32], rows: NDArray[np.float32], weight: WeightPart, plan: CodingPlan
) -> None:
    """Each input is off by half a step of its group at most, times what it was halved by; some are by much."""
    dense = to_float32(weight.scheme, weight.data, weight.shape).astype(np.float64)
    groups = rows[: len(found)].astype(np.float64).reshape(-1, GROUPS, 32)
    largest = np.abs(groups / plan.groups["factors"]).max(axis=2)
    steps = largest / np.where(plan.groups["wide"], 2 * 32512, 2 * 127)
    sizes = np.abs(dense).reshape(OUTPUTS, GROUPS, 32) * plan.groups["factors"]
    most = np.einsum("rg,ng->rn", steps, sizes.sum(axis=2))
    apart = np.abs(found - rows[: len(found)].astype(np.float64) @ dense.T)
    assert (apart <= 1.01 * most + 1e-3).all()
    assert (apart > 0.02 * most).any()  # the others do have 8 bits


@pytest.mark.parametrize(("sampled", "wide"), [(False, LOUD), (True, None)])
def test_the_loudest_groups_are_wide(sampled: bool, wide: Sequence[int] | None) -> None:
    """A quarter of 16 for tokens; for the logits half of them, the loud ones among those."""
    rows, weight = rows_with_loud_groups(), q8_0()
    found, (plan,) = computed(model_of(rows, weight, sampled=sampled), MIXED, [20])
    chosen = set(np.flatnonzero(plan.groups["wide"]).tolist())
    assert chosen == set(LOUD) if wide else len(chosen) == 8 and chosen > set(LOUD)
    assert (plan.groups["factors"] == 1).all()
    assert_near(found, rows, weight, plan)


def rows_with_loud_inputs() -> NDArray[np.float32]:
    """Input 5 of each group is 1.4, 2.8, 5.6, ... times as large as the others."""
    rows = RANDOM.uniform(0.5, 1.0, (VOCAB, GROUPS, 32)) * RANDOM.choice(
        (-1, 1), (VOCAB, GROUPS, 32)
    )
    rows[:, :, 5] *= 1.4 * 2.0 ** (np.arange(GROUPS) % 8)
    return bf16_exact(rows.reshape(VOCAB, GROUPS * 32))


@pytest.mark.parametrize("activations", ["mixed", "int8"])
@pytest.mark.parametrize("scheme", ["q4_0", "q5_1"])
def test_loud_inputs_are_halved_where_their_weights_can_be_doubled(
    activations: str, scheme: str
) -> None:
    rows = rows_with_loud_inputs()
    weight = q4_0() if scheme == "q4_0" else q5_1()
    settings = msgspec.structs.replace(MIXED, activations=activations)
    found, (plan,) = computed(model_of(rows, weight, sampled=False), settings, [41])
    if not FORMS_WITH_ROOM:
        assert (plan.groups["factors"] == 1).all()
        return
    assert not plan.groups["wide"].any()
    expected = [min(MOST_HALVINGS, group % 8) for group in range(GROUPS)]
    assert plan.groups["factors"][:, 5].tolist() == [2**halvings for halvings in expected]
    assert (np.delete(plan.groups["factors"], 5, axis=1) == 1).all()
    assert plan.groups["doubles"].tolist() == [halvings > 0 for halvings in expected]
    assert_near(found, rows, weight, plan)


def q5_1() -> WeightPart:
    blocks = RANDOM.integers(0, 256, (OUTPUTS * GROUPS, 24), np.uint8)
    blocks[:, :4] = np.array([0.02, -0.3], np.float16).view(np.uint8)
    return WeightPart("w", "q5_1", (OUTPUTS, GROUPS * 32), blocks.reshape(OUTPUTS, -1))


@pytest.mark.parametrize("has_field", [True, False])
def test_bytes_are_multiplied_by_powers_with_and_without_gfni(
    has_field: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_field and not intrinsics.HAS_BYTE_FIELD:
        pytest.skip("this CPU has no GFNI, or the level forbids it")
    monkeypatch.setattr(intrinsics, "HAS_BYTE_FIELD", has_field)

    @intrinsics.routine()
    def multiplied(e: Any, codes: Any, factors: Any, out: Any) -> None:
        parts = (e.load(place, intrinsics.INTS) for place in (codes, factors))
        e.store(e.times_powers(*parts), out)

    @numba.njit  # type: ignore[untyped-decorator]
    def multiply(codes: int, factors: int, out: int) -> None:
        multiplied(codes, factors, out)

    factors = np.uint8(1) << RANDOM.integers(0, MOST_HALVINGS + 1, 64).astype(np.uint8)
    codes, out = RANDOM.integers(0, 32, 64).astype(np.uint8), np.zeros(64, np.uint8)
    multiply(*(array.ctypes.data for array in (codes, factors, out)))
    np.testing.assert_array_equal(out, codes * factors)


def test_what_meets_one_weight_without_room_has_wide_groups() -> None:
    plan = CodingPlan.of(8, TOKENS, "mixed")
    plan.meets(NIBBLES)
    assert plan.num_wide == (0 if FORMS_WITH_ROOM else 2)
    plan.meets(BYTES_SIGNED)
    assert plan.num_wide == 2
    plan.loudness[:] = np.arange(8 * 32)
    plan.choose()
    assert plan.groups["wide"].tolist() == [0] * 6 + [1] * 2
    assert (plan.groups["factors"] == 1).all()


@pytest.mark.skipif(not FORMS_WITH_ROOM, reason="this level doubles no codes")
def test_few_inputs_of_a_group_are_loud_and_none_is_larger_than_numbers_are() -> None:
    plan = CodingPlan.of(3, TOKENS, "int8")
    plan.meets(NIBBLES)
    plan.loudness[:] = [0.01] * 17 + [1.0] * 15 + [0.0] * 24 + [1.0] * 8 + [0.3] * 31 + [np.inf]
    plan.choose()
    assert plan.groups["doubles"].tolist() == [0, 0, 1]
    assert plan.groups["factors"][2].tolist() == [1] * 31 + [8]


def test_no_group_and_every_group() -> None:
    rows, weight = rows_with_loud_groups(), q4_0()
    for activations, share in (("precise", 1), ("int8", 0)):
        settings = msgspec.structs.replace(MIXED, activations=activations)
        _, (plan,) = computed(model_of(rows, weight, sampled=False), settings, [3])
        assert (plan.groups["wide"] == share).all()
        assert activations == "int8" or (plan.groups["factors"] == 1).all()


@pytest.mark.parametrize("weight", [q4_0(), q8_0()], ids=["q4_0", "q8_0"])
def test_neither_batch_nor_runner_changes_a_bit(weight: WeightPart) -> None:
    model = model_of(rows_with_loud_inputs(), weight, sampled=False)
    whole, (plan,) = computed(model, MIXED, [37])
    parts, (again,) = computed(model, msgspec.structs.replace(MIXED, num_threads=1), [1, 16, 20])
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(plan.groups, again.groups)


def test_a_share_is_at_least_one_group_and_the_first_of_equal_ones() -> None:
    for groups, expected in ((1, [1]), (2, [1, 0]), (9, [1] * 4 + [0] * 5)):
        plan = CodingPlan.of(groups, SAMPLES, "mixed")
        assert plan.groups["wide"].all()  # until they are chosen
        plan.loudness[:] = 3.0
        plan.choose()
        assert plan.groups["wide"].tolist() == expected


def test_a_number_that_is_none_does_not_keep_a_model_from_loading() -> None:
    rows = rows_with_loud_groups()
    rows[:, 40] = np.nan
    for weight, num_wide in ((q4_0(), 0 if FORMS_WITH_ROOM else 4), (q8_0(), 4)):
        _, (plan,) = computed(model_of(rows, weight, sampled=False), MIXED, [2])
        assert plan.groups["wide"].sum() == num_wide


@pytest.mark.parametrize(
    ("length", "blocks", "rows"), [(4096, 40, 64), (20, 40, 20), (4096, 1, 16)]
)
def test_the_trial_fits_a_context_and_the_pool(length: int, blocks: int, rows: int) -> None:
    settings = msgspec.structs.replace(MIXED, max_model_len=length)
    batch = trial_batch(settings, VOCAB, blocks, 2)
    assert len(batch.token_ids) == rows and batch.token_ids.max() < VOCAB
    assert batch.slots.max() < blocks * settings.block_size and batch.sample_rows[-1] == rows - 1
