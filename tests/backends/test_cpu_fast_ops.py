"""Every operation of the CPU fast path against the NumPy oracle, at shapes that do not come out even."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from fast_beside_oracle import (
    RANDOM,
    VOCAB,
    both,
    input_rows,
    product_model,
    random_blocks,
    rows_batch,
    settings_for,
)
from numpy.typing import NDArray

from headrace.backends.cpu.fast.packing import UnsupportedModel
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.models.dequantize import to_float32
from headrace.testing.small_models import bf16_exact, plain_part, small_model
from headrace.types import WeightPart

Floats = NDArray[np.float32]


def rowwise_model(width: int, operation: Callable[..., Any], rows: Floats, out: int) -> LoadedModel:
    """embed -> operation(ops, x, vector) -> take_rows."""
    vector = bf16_exact(1 + 0.3 * RANDOM.standard_normal(width))

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        return ops.hold([parts["embedding"]]), ops.hold_vector(vector)

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.embed(weights[0], step, 1.5)
        return ops.take_rows(operation(ops, x, weights[1]), step)

    return small_model({"embedding": plain_part("embedding", rows)}, load, forward, width=out)


def twice(ops: Any, x: Any, vector: Any) -> Any:
    """A norm of a sum, added to the sum itself."""
    first = ops.rms_norm(x, vector, 1e-6)
    normed, residual = ops.add_rms_norm(first, x, vector, 1e-5)
    return ops.add(normed, residual)


ROWWISE: Mapping[str, tuple[Callable[..., Any], int]] = {
    "embed": (lambda ops, x, vector: x, 1),
    "rms_norm": (lambda ops, x, vector: ops.rms_norm(x, vector, 1e-6), 1),
    "add_rms_norm": (twice, 1),
    "silu_mul": (lambda ops, x, vector: ops.silu_mul(x), 2),
    "gelu_mul": (lambda ops, x, vector: ops.gelu_mul(x), 2),
    "soft_cap": (lambda ops, x, vector: ops.soft_cap(x, 3.0), 1),
}


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize(("width", "num_rows", "num_threads"), [(96, 1, 1), (352, 37, 2)])
def test_rows(name: str, width: int, num_rows: int, num_threads: int) -> None:
    operation, share = ROWWISE[name]
    model = rowwise_model(width, operation, input_rows(width, 4.0), width // share)
    found, expected = both(model, [rows_batch(num_rows)], settings_for(num_threads))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_norm_per_head_and_a_split() -> None:
    def operation(ops: Any, x: Any, vector: Any) -> Any:
        _, second = ops.split(x, [32, 96])
        return ops.rms_norm(second, vector, 1e-6, 3)

    vector = bf16_exact(1 + 0.3 * RANDOM.standard_normal(32))
    rows = input_rows(128)

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        return ops.hold([parts["embedding"]]), ops.hold_vector(vector)

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = operation(ops, ops.embed(weights[0], step), weights[1])
        return ops.take_rows(x, step)

    model = small_model({"embedding": plain_part("embedding", rows)}, load, forward, width=96)
    found, expected = both(model, [rows_batch(5)])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_rows_may_be_taken_in_any_order_and_twice() -> None:
    model = rowwise_model(64, ROWWISE["embed"][0], input_rows(64), 64)
    found, expected = both(model, [rows_batch(9, [8, 0, 3, 3])])
    np.testing.assert_array_equal(found, expected)


# --- products -------------------------------------------------------------------


def expected_product(parts: Sequence[WeightPart], rows: Floats) -> NDArray[np.float64]:
    dense = np.concatenate(
        [to_float32(part.scheme, part.data, part.shape) for part in parts]
    ).astype(np.float64)
    return rows.astype(np.float64) @ dense.T


BLOCK_SCHEMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


@pytest.mark.parametrize("scheme", BLOCK_SCHEMES)
@pytest.mark.parametrize(
    ("outputs", "num_rows", "num_threads"), [(50, 1, 1), (16, 3, 2), (170, 29, 2)]
)
def test_products_of_blocks(scheme: str, outputs: int, num_rows: int, num_threads: int) -> None:
    inputs = 512 if scheme.endswith("k") else 96
    part, rows = random_blocks(scheme, outputs, inputs), input_rows(inputs)
    model = product_model([part], rows)
    found, _ = both(model, [rows_batch(num_rows)], settings_for(num_threads))
    expected = expected_product([part], rows[:num_rows])
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("scheme", BLOCK_SCHEMES)
def test_activations_of_8_bits(scheme: str) -> None:
    """Each is off by at most half a 127th of its group's largest."""
    inputs = 512 if scheme.endswith("k") else 96
    part, rows = random_blocks(scheme, 50, inputs), input_rows(inputs)
    settings = msgspec.structs.replace(settings_for(), activations="int8")
    found, _ = both(product_model([part], rows), [rows_batch(13)], settings)
    expected = expected_product([part], rows[:13])
    largest = np.abs(rows[:13]).reshape(13, -1, 32).max(axis=2, keepdims=True)
    dense = np.abs(to_float32(part.scheme, part.data, part.shape)).reshape(50, -1, 32)
    most = np.einsum("rgo,ngi->rn", largest / 254, dense)
    assert (np.abs(found - expected) <= 1.01 * most + 1e-4).all()
    assert (np.abs(found - expected) > 1e-4 * np.abs(expected).max()).any()


@pytest.mark.parametrize("scheme", ["q8_0", "q5_0", "q4_1"])
def test_codes_whose_low_byte_has_no_negative(scheme: str) -> None:
    """A low byte of -128 is kept as -127: a code is 1 off then, and so is what is taken off its sums."""
    part = random_blocks(scheme, 50, 96)
    rows = np.full((VOCAB, 96), 128 / 32512, np.float32)
    rows[:, ::32] = 1.0
    rows = bf16_exact(rows)
    found, _ = both(product_model([part], rows), [rows_batch(3)])
    expected = expected_product([part], rows[:3])
    dense = np.abs(to_float32(part.scheme, part.data, part.shape)).sum(axis=1)
    assert (np.abs(found - expected) <= 1.6 / 32512 * dense + 1e-5).all()


@pytest.mark.parametrize("scheme", ["f32", "f16", "bf16"])
def test_products_of_plain_weights_round_them_to_bf16_alone(scheme: str) -> None:
    dense = bf16_exact(RANDOM.standard_normal((45, 64)))
    stored: Any = dense
    if scheme == "f16":
        stored = dense.astype(np.float16)
        dense = bf16_exact(stored.astype(np.float32))
        stored = dense.astype(np.float16)
    if scheme == "bf16":
        stored = (dense.view(np.uint32) >> 16).astype(np.uint16)
    bias, rows = RANDOM.standard_normal(45).astype(np.float32), input_rows(64)
    part = WeightPart("weight", scheme, (45, 64), stored)
    found, expected = both(product_model([part], rows, bias), [rows_batch(11)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-4)


def test_parts_of_different_schemes_are_stacked_and_share_a_bias() -> None:
    parts = [
        random_blocks("q4_k", 48, 256, "q"),
        random_blocks("q4_1", 16, 256, "k"),
        random_blocks("q6_k", 32, 256, "v"),
        WeightPart("w", "bf16", (20, 256), RANDOM.integers(0x3C00, 0x3D80, (20, 256)).astype("u2")),
    ]
    bias, rows = RANDOM.standard_normal(116).astype(np.float32), input_rows(256)
    found, _ = both(product_model(parts, rows, bias), [rows_batch(6)])
    expected = expected_product(parts, rows[:6]) + bias
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_an_embedding_of_blocks(scheme: str) -> None:
    part = random_blocks(scheme, VOCAB, 256)

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        return ops.hold([parts["weight"]])

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        return ops.take_rows(ops.embed(weights, step), step)

    model = small_model({"weight": part}, load, forward, width=256)
    found, expected = both(model, [rows_batch(VOCAB)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_a_nan_in_a_row_reaches_that_row_alone() -> None:
    rows = input_rows(64)
    rows[2, 40] = np.nan
    rows[4, 3] = np.inf
    found, _ = both(product_model([random_blocks("q4_1", 32, 64)], rows), [rows_batch(6)])
    assert np.isnan(found[[2, 4]]).all() and np.isfinite(found[[0, 1, 3, 5]]).all()


def test_sizes_that_do_not_fit_tiles_are_refused() -> None:
    for parts in (
        [plain_part("w", np.ones((16, 48)))],
        [random_blocks("q4_1", 20, 64, "a"), random_blocks("q8_0", 16, 64, "b")],
    ):
        model = product_model(parts, input_rows(parts[0].shape[1]))
        with pytest.raises(UnsupportedModel, match="multiple of"):
            FastRunner(model, SingleRank(), settings_for())
