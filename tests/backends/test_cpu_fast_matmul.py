"""Products of many rows, in shares of threads, and gates that follow a product at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numba
import numpy as np
import pytest
from fast_beside_oracle import (
    BLOCKS,
    both,
    input_rows,
    product_model,
    random_blocks,
    rows_batch,
    settings_for,
)
from numpy.typing import NDArray

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.coding_plan import CodingPlan
from headrace.backends.cpu.fast.kernels_coding import (
    CODES,
    PLAN_BYTES,
    RECORD_SCALE,
    RUN_BYTES,
    coded_row,
    group_bytes,
    row_bytes,
)
from headrace.backends.cpu.fast.kernels_matmul import GATED_ROWS, ROWS_PER_SHARE
from headrace.backends.cpu.fast.kernels_quantize import GATED_ROW, quantize_row, quantize_rows
from headrace.backends.cpu.fast.kernels_tiles import FORMS_WITH_ROOM
from headrace.backends.cpu.fast.layout import TOKENS
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.small_models import plain_part, small_model
from headrace.types import WeightPart

WIDTH, INNER, OUTPUTS = 96, 160, 48
MIXED = msgspec.structs.replace(settings_for(), activations="mixed")
GROUP_BYTES = group_bytes(CODES)
RANDOM = np.random.default_rng(17)


def bits_of(model: LoadedModel, settings: Any, batch: Any) -> tuple[NDArray[np.int32], list[str]]:
    """Return the bits of the logits, and the names of the program's operations."""
    runner = FastRunner(model, SingleRank(), settings)
    try:
        runner.allocate(BLOCKS)
        runner.execute(batch)
        names = [at.CODE_NAMES[code] for code in runner._program.operations[:, at.CODE]]
        return runner.last_logits().view(np.int32), names
    finally:
        runner.close()


@pytest.mark.parametrize("num_rows", [2 * ROWS_PER_SHARE - 1, 2 * ROWS_PER_SHARE, 149, 300])
@pytest.mark.parametrize("scheme", ["q4_1", "q8_0", "q6_k"])
def test_many_rows_are_cut_into_shares_of_whole_rows(scheme: str, num_rows: int) -> None:
    inputs = 512 if scheme.endswith("k") else WIDTH
    model = product_model([random_blocks(scheme, 170, inputs)], input_rows(inputs))
    batch = rows_batch(num_rows)
    found, expected = both(model, [batch], settings_for(2))
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)
    for num_threads in (1, 3):
        again, _ = bits_of(model, settings_for(num_threads), batch)
        np.testing.assert_array_equal(again, found.view(np.int32))


def gated_model(gate: Sequence[WeightPart], down: WeightPart, name: str) -> LoadedModel:
    """embed -> linear -> gate -> linear."""
    parts = {"embedding": plain_part("embedding", input_rows(WIDTH)), "down": down}
    parts |= {f"gate{index}": part for index, part in enumerate(gate)}

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        stacked = [part for key, part in parts.items() if key.startswith("gate")]
        return ops.hold([parts["embedding"]]), ops.hold(stacked), ops.hold([parts["down"]])

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.linear(ops.embed(weights[0], step), weights[1])
        x = ops.silu_mul(x) if name == "silu" else ops.gelu_mul(x)
        return ops.take_rows(ops.linear(x, weights[2]), step)

    return small_model(parts, load, forward, width=down.shape[0])


def blocks(scheme: str, outputs: int, inputs: int) -> WeightPart:
    if scheme == "bf16":
        return plain_part("w", RANDOM.standard_normal((outputs, inputs)) * 0.1)
    return random_blocks(scheme, outputs, inputs)


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize(
    "schemes", [("q4_1", "q4_1"), ("q4_1", "q8_0"), ("bf16", "bf16"), ("q8_0", "bf16")]
)
def test_a_gate_follows_its_product_at_once(schemes: tuple[str, str], name: str) -> None:
    gate, down = blocks(schemes[0], 2 * INNER, WIDTH), blocks(schemes[1], OUTPUTS, INNER)
    model = gated_model([gate], down, name)
    for num_rows in (1, 13, GATED_ROWS + 44):
        batch = rows_batch(num_rows)
        found, expected = both(model, [batch], settings_for(2))
        np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max(), rtol=0)
        for num_threads in (1, 3):
            again, names = bits_of(model, settings_for(num_threads), batch)
            np.testing.assert_array_equal(again, found.view(np.int32))
            assert name not in names and names.count("linear") == 2


def test_a_gate_at_once_depends_on_no_batch() -> None:
    same, down = random_blocks("q4_1", 2 * INNER, WIDTH), random_blocks("q4_1", OUTPUTS, INNER)
    model = gated_model([same], down, "silu")
    together, _ = bits_of(model, MIXED, rows_batch(120))
    few, _ = bits_of(model, MIXED, rows_batch(7))
    np.testing.assert_array_equal(together[:7], few)


def test_a_gate_whose_halves_are_held_in_two_forms_has_its_own_operation() -> None:
    down = random_blocks("q4_1", OUTPUTS, INNER)
    halves = [random_blocks("q4_1", INNER, WIDTH), random_blocks("q8_0", INNER, WIDTH)]
    model = gated_model(halves, down, "silu")
    found, expected = both(model, [rows_batch(120)], settings_for(2))
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max(), rtol=0)
    _, names = bits_of(model, MIXED, rows_batch(120))
    assert "silu" in names


def test_a_gate_that_nobody_reads_harms_nobody() -> None:
    parts = {"embedding": plain_part("embedding", input_rows(WIDTH))}
    parts |= {"gate": blocks("q4_1", 2 * INNER, WIDTH), "w": blocks("q4_1", OUTPUTS, WIDTH)}

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        return [ops.hold([parts[name]]) for name in ("embedding", "gate", "w")]

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.embed(weights[0], step)
        ops.silu_mul(ops.linear(x, weights[1]))
        return ops.take_rows(ops.linear(x, weights[2]), step)

    model = small_model(parts, load, forward, width=OUTPUTS)
    found, expected = both(model, [rows_batch(20)])
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


GROUPS, ROWS = 19, 8


@numba.njit  # type: ignore[untyped-decorator]
def code_rows(x: int, plan: int, out: int, stride: int, way: int) -> None:
    """Way 0: row by row; 1: group by group of a row; 2: row by row of a group."""
    for row in range(ROWS):
        target = coded_row(out, np.int64(row), stride, CODES)
        if way == 0:
            quantize_row(x + row * GROUPS * 128, GROUPS, CODES, plan, target)
        for group in range(GROUPS if way == 1 else 0):
            place, here = target + group * GROUP_BYTES, plan + group * PLAN_BYTES
            quantize_row(x + (row * GROUPS + group) * 128, 1, CODES, here, place)
    for group in range(GROUPS if way == 2 else 0):
        gated = x + group * ROWS * GATED_ROW
        quantize_rows(gated, ROWS, group, GROUPS, CODES, plan, coded_row(out, 0, stride, CODES))


@pytest.mark.parametrize("num_wide", [0, 1])
def test_groups_together_are_coded_as_one_by_one(num_wide: int) -> None:
    plan = CodingPlan.of(GROUPS, TOKENS, "mixed")
    plan.groups["wide"] = 0
    plan.groups["wide"][:num_wide] = 1
    if FORMS_WITH_ROOM and not num_wide:
        halvings = RANDOM.integers(0, 4, (GROUPS, 32)) * (np.arange(GROUPS) % 2)[:, None]
        plan.groups["factors"], plan.groups["shares"] = 1 << halvings, 0.5**halvings
        plan.groups["doubles"] = halvings.any(axis=1)
    rows = (RANDOM.standard_normal((ROWS, GROUPS, 32)) * 10).astype(np.float32)
    rows[1, 3], rows[2, 5], rows[2, 6, 1:] = 0, -7.5, 0
    rows[3, 2, 31], rows[4, 9, 0], rows[5, 18, 7] = np.nan, -np.inf, np.inf
    gated = np.zeros((GROUPS, ROWS, 2, 32), np.float32)
    gated[:, :, 0] = rows.transpose(1, 0, 2)
    stride, found = row_bytes(CODES, GROUPS), []
    for way in range(2 if num_wide else 3):  # group by group a group's low bytes lie elsewhere
        out = np.zeros(ROWS * stride + 64, np.uint8)
        out = out[-out.ctypes.data % 64 :][: ROWS * stride]
        source = gated if way == 2 else rows
        code_rows(source.ctypes.data, plan.groups.ctypes.data, out.ctypes.data, stride, way)
        runs = out[: ROWS * GROUPS * RUN_BYTES[CODES]].reshape(GROUPS, ROWS, -1)
        found.append(runs.transpose(1, 0, 2).copy())
    scales = found[0][:, :, RECORD_SCALE : RECORD_SCALE + 4].copy().view(np.float32)[..., 0]
    is_finite = np.isfinite(rows).all(axis=2)
    np.testing.assert_array_equal(np.isfinite(scales), is_finite)
    assert np.isnan(scales[~is_finite]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other[is_finite], found[0][is_finite])
        np.testing.assert_array_equal(
            other[~is_finite][:, RECORD_SCALE : RECORD_SCALE + 4],
            found[0][~is_finite][:, RECORD_SCALE : RECORD_SCALE + 4],
        )
