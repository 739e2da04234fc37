"""Every operation of the CPU fast path against the NumPy oracle, at shapes that do not come out even."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast.packing import UnsupportedModel
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.runner import OpsRunner
from headrace.group import SingleRank
from headrace.interfaces import AttentionSpec, LoadedModel
from headrace.models.dequantize import to_float32
from headrace.models.gguf_types import FORMAT_OF_SCHEME
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.small_models import bf16_exact, plain_part, small_model
from headrace.types import EngineSettings, KVGroupSpec, WeightPart

Floats = NDArray[np.float32]
VOCAB = 50
MAX_POSITIONS = 512
BLOCKS = 40
RANDOM = np.random.default_rng(5)


class OracleRunner:
    """OpsRunner on NumpyOps that keeps the result of the forward."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self._ops = NumpyOps()
        self._model = model
        self._runner = OpsRunner(self._ops, model, SingleRank(), settings, schemes=NumpyOps.schemes)

    def result(self, batches: Sequence[Any]) -> Floats:
        self._runner.allocate(BLOCKS)
        for batch in batches:
            step = self._ops.plan_step(batch)
            found = self._model.architecture.forward(
                self._ops, SingleRank(), self._runner._weights, step
            )
        return np.asarray(found, np.float32)


def settings_for(num_threads: int = 2, block_size: int = 16) -> EngineSettings:
    return EngineSettings(
        num_threads=num_threads, block_size=block_size, max_model_len=MAX_POSITIONS
    )


def both(
    model: LoadedModel, batches: Sequence[Any], settings: EngineSettings | None = None
) -> tuple[Floats, Floats]:
    """Return what the fast path and what the oracle give for the last batch."""
    settings = settings or settings_for()
    runner = FastRunner(model, SingleRank(), settings)
    try:
        runner.allocate(BLOCKS)
        for batch in batches:
            runner.execute(batch)
        found = runner.last_logits()
    finally:
        runner.close()
    return found, OracleRunner(model, settings).result(batches)


def rows_batch(num_rows: int, sample_rows: Sequence[int] | None = None) -> Any:
    """One sequence of tokens 0, 1, ... whose every row (or `sample_rows`) is wanted."""
    wanted = list(range(num_rows)) if sample_rows is None else list(sample_rows)
    tokens = (np.arange(num_rows) % VOCAB).tolist()
    return forward_batch([SequenceStep(tokens, 0, range(BLOCKS), wanted)], block_size=16)


def input_rows(width: int, scale: float = 1.0) -> Floats:
    return bf16_exact(RANDOM.standard_normal((VOCAB, width)) * scale)


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


def random_blocks(scheme: str, rows: int, columns: int, name: str = "weight") -> WeightPart:
    """Random bytes are valid blocks, once the scales are numbers of a sensible size."""
    block_format = FORMAT_OF_SCHEME[scheme]
    count = rows * columns // block_format.block_size
    blocks = RANDOM.integers(0, 256, (count, block_format.block_bytes), np.uint8)
    places = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
    for place in places.get(scheme, (0,)):
        numbers = (RANDOM.standard_normal(count) * 0.02).astype(np.float16)
        blocks[:, place : place + 2] = numbers.view(np.uint8).reshape(count, 2)
    return WeightPart(name, scheme, (rows, columns), blocks.reshape(rows, -1))


def product_model(
    parts: Sequence[WeightPart], rows: Floats, bias: Floats | None = None
) -> LoadedModel:
    """embed -> linear -> take_rows."""
    named = {"embedding": plain_part("embedding", rows)}
    named |= {f"{index}": part for index, part in enumerate(parts)}

    def load(ops: Any, parts: Mapping[str, WeightPart], _: Any) -> Any:
        stacked = [part for name, part in parts.items() if name != "embedding"]
        return ops.hold([parts["embedding"]]), ops.hold(stacked, bias)

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.take_rows(ops.embed(weights[0], step), step)
        return ops.linear(x, weights[1])

    width = sum(part.shape[0] for part in parts)
    return small_model(named, load, forward, width=width)


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
    np.testing.assert_allclose(found, expected, atol=5e-4 * np.abs(expected).max(), rtol=0)


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
    np.testing.assert_allclose(found, expected, atol=5e-4 * np.abs(expected).max(), rtol=0)


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


# --- attention ------------------------------------------------------------------


def attention_model(spec: AttentionSpec, rotary: int) -> LoadedModel:
    """embed -> split -> rope_write_kv -> paged_attention -> take_rows."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = input_rows(q_size + 2 * kv_size)
    frequencies = 100.0 ** -(np.arange(rotary // 2) / (rotary // 2))

    def load(ops: Any, parts: Mapping[str, WeightPart], settings: Any) -> Any:
        table = ops.rope_table(frequencies, 1.0, settings.max_positions)
        return ops.hold([parts["embedding"]]), table

    def forward(ops: Any, weights: Any, step: Any) -> Any:
        x = ops.embed(weights[0], step)
        q, k, v = ops.split(x, [q_size, kv_size, kv_size])
        q = ops.rope_write_kv(q, k, v, weights[1], 0, step)
        return ops.take_rows(ops.paged_attention(q, 0, spec, step), step)

    group = KVGroupSpec(
        name="all", layers=(0,), num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        sliding_window=spec.sliding_window,
    )  # fmt: skip
    parts = {"embedding": plain_part("embedding", rows)}
    return small_model(parts, load, forward, width=q_size, groups=[group])


def mixed_batches(block_size: int) -> list[Any]:
    """Two prompts, then decodes beside the rest of a third, all through scattered tables."""
    blocks = np.random.default_rng(3).permutation(BLOCKS).tolist()
    per_sequence = -(-170 // block_size)
    tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(3)]
    tokens = RANDOM.integers(0, VOCAB, 400).tolist()
    prompts = [
        SequenceStep(tokens[:131], 0, tables[0]),
        SequenceStep(tokens[:1], 0, tables[1]),
        SequenceStep(tokens[100:133], 0, tables[2]),
    ]
    following = [
        SequenceStep([7], 131, tables[0]),
        SequenceStep(tokens[50:101], 33, tables[2], range(51)),
        SequenceStep([9], 1, tables[1]),
    ]
    return [forward_batch(steps, block_size=block_size) for steps in (prompts, following)]


SPECS = {
    "like SmolLM2": (AttentionSpec(9, 3, 64, 0.125), 64, 16),
    "one head": (AttentionSpec(1, 1, 32, 0.25), 16, 16),
    "window": (AttentionSpec(4, 1, 32, 0.2, sliding_window=20), 32, 32),
    "window of one": (AttentionSpec(2, 2, 16, 0.2, sliding_window=1), 16, 16),
    "capped": (AttentionSpec(4, 2, 80, 0.3, softcap=5.0), 32, 16),
    "many heads share": (AttentionSpec(14, 2, 96, 0.1), 96, 48),
    "wide": (AttentionSpec(4, 1, 256, 0.0625, sliding_window=100), 256, 16),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_attention_of_a_mixed_batch(name: str, num_threads: int) -> None:
    spec, rotary, block_size = SPECS[name]
    batches = mixed_batches(block_size)
    model = attention_model(spec, rotary)
    found, expected = both(model, batches, settings_for(num_threads, block_size))
    assert len(found) == 53
    np.testing.assert_allclose(found, expected, atol=0.02, rtol=0.02)


def test_attention_never_reads_past_a_sequence() -> None:
    spec, rotary, block_size = SPECS["like SmolLM2"]
    model = attention_model(spec, rotary)
    runner = FastRunner(model, SingleRank(), settings_for())
    try:
        runner.allocate(BLOCKS)
        batches = mixed_batches(block_size)
        runner.execute(batches[0])
        runner.execute(batches[1])
        clean = runner.last_logits()
        taken = {int(slot) for batch in batches for slot in batch.slots.ravel()}
        spoiled = [slot for slot in range(BLOCKS * block_size) if slot not in taken]
        broken = np.full((len(spoiled), 3, 64), np.nan, np.float32)
        runner.write_rows(0, spoiled, broken, broken)
        runner.execute(batches[1])
        np.testing.assert_array_equal(runner.last_logits(), clean)
    finally:
        runner.close()
