"""The CPU's operations other than attention and the draw, each against the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.kv_pool import zero_plane
from headrace.backends.cpu.memory import available_memory
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.weights import PackedWeight, RowsWeight, can_pack
from headrace.errors import ConfigError, ModelError
from headrace.testing.numpy_ops import NumpyOps
from headrace.types import EngineSettings, KVGroupSpec, WeightPart

Array = np.ndarray[Any, np.dtype[Any]]
ROWS = [1, 2, 3, 16, 17, 130]
SIZES = [1, 15, 16, 17, 576]
ERRORS: Mapping[torch.dtype, float] = {torch.float32: 4e-6, torch.bfloat16: 8e-3}


def make_ops(**settings: Any) -> CpuOps:
    return CpuOps(EngineSettings(**{"dtype": "float32", "num_threads": 2, **settings}))


def random_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(given: torch.Tensor, exact: Array) -> None:
    bound = ERRORS[given.dtype] * max(1.0, float(np.abs(exact).max(initial=0)))
    assert given.shape == exact.shape
    assert np.abs(given.double().numpy() - exact).max(initial=0) <= bound


def column_view(x: Array, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values as columns of a wider tensor, as `split` gives them."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), float("nan"), dtype=dtype)
    wide[:, 8 : 8 + x.shape[1]] = torch.tensor(x)
    return wide[:, 8 : 8 + x.shape[1]]


# --- row by row ---------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(num_rows: int, size: int, dtype: torch.dtype) -> None:
    ops, oracle = make_ops(), NumpyOps()
    x, residual = (
        column_view(random_array(num_rows, size), dtype),
        random_array(num_rows, size, seed=1),
    )
    weight = random_array(size, seed=2)
    exact_x = x.double().numpy()
    held = ops.hold_vector(weight)
    close(ops.rms_norm(x, held, 1e-5), oracle.rms_norm(exact_x, weight.astype(np.float64), 1e-5))
    given, total = ops.add_rms_norm(x, torch.tensor(residual), held, 1e-5)
    exact, exact_total = oracle.add_rms_norm(exact_x, residual.astype(np.float64), weight, 1e-5)
    close(given, exact)
    close(total, exact_total)


def test_a_norm_per_head() -> None:
    ops, oracle = make_ops(), NumpyOps()
    x, weight = random_array(5, 6 * 32), random_array(32, seed=2)
    given = ops.rms_norm(column_view(x), ops.hold_vector(weight), 1e-6, 6)
    close(given, oracle.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6, 6))


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e4])
def test_norms_of_extreme_rows(scale: float) -> None:
    ops, oracle = make_ops(), NumpyOps()
    x, weight = random_array(2, 64) * np.float32(scale), np.ones(64, np.float32)
    given = ops.rms_norm(torch.tensor(x), ops.hold_vector(weight), 1e-5)
    close(given, oracle.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-5))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gates(num_rows: int, size: int, name: str) -> None:
    ops, oracle = make_ops(), NumpyOps()
    x = random_array(num_rows, 2 * size) * np.float32(4)
    x[0, 0] = 120
    x[-1, 0] = -120
    close(getattr(ops, name)(column_view(x)), getattr(oracle, name)(x.astype(np.float64)))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rotary_half", [32, 16])
def test_rotation_and_write(kv_dtype: str, rotary_half: int) -> None:
    group = KVGroupSpec(name="g", layers=(0,), num_kv_heads=2, head_dim=64)
    ops, oracle = make_ops(kv_dtype=kv_dtype), NumpyOps()
    frequencies = 1e4 ** -(np.arange(rotary_half) / rotary_half)
    steps = [SequenceStep([0] * 19, 30, [5, 0, 3, 1]), SequenceStep([0], 2, [4])]
    batch = forward_batch(steps, block_size=16)
    q, k, v = (random_array(20, heads * 64, seed=heads) for heads in (6, 2, 2))
    ops.allocate_kv([group], 6, 16)
    oracle.allocate_kv([group], 6, 16)
    given_q = ops.rope_write_kv(
        *(column_view(q), column_view(k), column_view(v)),
        *(ops.rope_table(frequencies, 1.25, 64), 0, ops.plan_step(batch)),
    )
    exact_q = oracle.rope_write_kv(
        *(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)),
        *(oracle.rope_table(frequencies, 1.25, 64), 0, oracle.plan_step(batch)),
    )
    close(given_q, exact_q)
    layer, exact = ops.layers[0], oracle.layers[0]
    unit = {"float32": 4e-6, "bfloat16": 2**-8, "float16": 2**-11}[kv_dtype]
    for given_plane, exact_plane in ((layer.keys, exact.keys), (layer.values, exact.values)):
        given = given_plane.double().numpy()
        assert (np.abs(given - exact_plane) <= unit * np.abs(exact_plane) + 4e-6).all()
        assert ((given == 0) == (exact_plane == 0)).all()


def test_embed_take_add_split_and_soft_cap() -> None:
    ops, oracle = make_ops(), NumpyOps()
    rows = random_array(40, 24)
    part = WeightPart("model.embed_tokens.weight", "f32", rows.shape, rows)
    batch = forward_batch([SequenceStep([3, 39, 0], 0, [0])], block_size=16)
    step, exact_step = ops.plan_step(batch), oracle.plan_step(batch)
    held = ops.hold([part])
    assert isinstance(held, RowsWeight)
    x = ops.embed(held, step, 2.5)
    exact = oracle.embed(oracle.hold([part]), exact_step, 2.5)
    close(x, exact)
    close(ops.take_rows(x, step), oracle.take_rows(exact, exact_step))
    close(ops.add(x, x.clone()), 2 * exact)
    close(torch.cat(list(ops.split(x, (8, 16))), dim=1), exact)
    close(ops.soft_cap(x.clone(), 3.0), oracle.soft_cap(exact, 3.0))


# --- products -----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("in_size", "out_size"), [(16, 1), (17, 33), (100, 16), (576, 50)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_products(
    num_rows: int, in_size: int, out_size: int, dtype: str, deterministic: bool
) -> None:
    ops, oracle = make_ops(dtype=dtype, deterministic=deterministic), NumpyOps()
    rows, bias = random_array(out_size, in_size, seed=1), random_array(out_size, seed=2)
    x = random_array(num_rows, in_size)
    part = WeightPart("model.layers.0.mlp.down_proj.weight", "f32", rows.shape, rows)
    given = ops.linear(torch.tensor(x), ops.hold([part], bias))
    exact = oracle.linear(x.astype(np.float64), oracle.hold([part], bias))
    rounding = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}[dtype]
    scale = np.abs(x).astype(np.float64) @ np.abs(rows).T.astype(np.float64) + np.abs(bias)
    assert (np.abs(given.double().numpy() - exact) <= rounding * scale).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_products_depend_on_their_row_alone(dtype: str) -> None:
    rows, x = random_array(700, 130, seed=1), torch.tensor(random_array(67, 130))
    part = WeightPart("model.layers.0.mlp.up_proj.weight", "f32", rows.shape, rows)
    results = []
    for threads in (1, 2):
        ops = make_ops(dtype=dtype, deterministic=True, num_threads=threads)
        held = ops.hold([part])
        whole = ops.linear(x, held)
        single = torch.cat([ops.linear(x[i : i + 1], held) for i in range(len(x))])
        assert torch.equal(whole, single)
        results.append(whole)
    assert torch.equal(*results)


def test_the_vocabulary_gives_float32_logits_whatever_the_dtype() -> None:
    ops = make_ops(dtype="bfloat16")
    rows = random_array(33, 48)
    held = ops.hold([WeightPart("lm_head.weight", "f32", rows.shape, rows)])
    assert isinstance(held, RowsWeight)
    assert ops.linear(torch.tensor(random_array(2, 48)).bfloat16(), held).dtype == torch.float32


def test_parts_of_several_schemes_are_stacked() -> None:
    ops = make_ops()
    f32 = random_array(5, 32)
    f16 = random_array(7, 32, seed=1).astype(np.float16)
    bf16 = (random_array(2, 32, seed=2).view(np.uint32) >> 16).astype(np.uint16)
    name = "model.embed_tokens.weight"
    parts = [
        WeightPart(name, "f16", f16.shape, f16),
        WeightPart(name, "f32", f32.shape, f32),
        WeightPart(name, "bf16", bf16.shape, bf16),
    ]
    held = ops.hold(parts)
    assert isinstance(held, RowsWeight)
    exact = NumpyOps().hold(parts).rows
    assert (held.rows.double().numpy() == exact).all()


def test_rows_stored_as_they_are_held_are_not_copied() -> None:
    rows = random_array(20, 32)
    rows.flags.writeable = False
    part = WeightPart("lm_head.weight", "f32", rows.shape, rows)
    held = make_ops().hold([part])
    assert isinstance(held, RowsWeight)
    assert held.rows.data_ptr() == rows.__array_interface__["data"][0]


def test_packed_weights_are_counted_once() -> None:
    if not can_pack(torch.float32):
        pytest.skip("oneDNN is not available in this torch")
    ops = make_ops()
    rows = random_array(64, 32)
    held = ops.hold([WeightPart("a.weight", "f32", rows.shape, rows)], random_array(64))
    assert isinstance(held, PackedWeight)
    assert ops.weight_bytes() == 64 * 33 * 4


def test_a_scheme_that_was_not_expanded_is_named() -> None:
    part = WeightPart("a.weight", "q4_1", (2, 32), np.zeros((2, 20), np.uint8))
    with pytest.raises(ModelError, match="'a.weight' is stored as q4_1"):
        make_ops().hold([part])


@pytest.mark.parametrize("field", ["dtype", "kv_dtype"])
def test_unknown_dtypes_are_refused_with_what_there_is(field: str) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16.*'int3'"):
        make_ops(**{field: "int3"})


def test_float32_keeps_its_precision_beside_outliers() -> None:
    """A few activations a thousand times the others, as trained models have them: one sum after the
    other has an error of 1.4e-3 here."""
    x, rows = random_array(64, 4096), random_array(64, 4096, seed=9)
    x[:, ::509] *= 1000
    ops = make_ops()
    held = ops.hold([WeightPart("model.layers.0.mlp.down_proj.weight", "f32", rows.shape, rows)])
    error = ops.linear(torch.tensor(x), held).double().numpy() - x.astype(np.float64) @ rows.T
    assert np.sqrt((error**2).mean()) < 1.1e-3


# --- KV storage ---------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_rows_and_blocks_move_in_every_layer(kv_dtype: str) -> None:
    groups = [
        KVGroupSpec(name="full", layers=(0, 2), num_kv_heads=2, head_dim=16),
        KVGroupSpec(name="window", layers=(1,), num_kv_heads=2, head_dim=16, sliding_window=4),
    ]
    ops = make_ops(kv_dtype=kv_dtype)
    size = 4 if kv_dtype == "float32" else 2
    assert ops.kv_bytes_per_block(groups, 8) == 2 * 8 * 3 * 2 * 16 * size
    ops.allocate_kv(groups, 5, 8)
    ops.layers[1].bias = zero_plane((5, 8, 2), torch.float32)
    keys = np.round(random_array(3, 2, 16) * 8)
    for layer in (0, 1, 2):
        ops.write_rows(layer, [9, 31, 0], keys + layer, -keys)
        bias = ops.layers[layer].bias
        if bias is not None:
            bias[1] = 3.0
    ops.copy_blocks([(1, 4), (4, 2)])
    for layer in (0, 1, 2):
        for slot in (9, 33, 17):
            read_keys, read_values = ops.read_rows(layer, [slot, 31])
            assert (read_keys == keys[:2] + layer).all() or slot != 9
            assert (read_keys[0] == keys[0] + layer).all()
            assert (read_values[0] == -keys[0]).all()
    moved = ops.layers[1].bias
    assert moved is not None
    assert (moved[[1, 2, 4]] == 3).all()


def test_untouched_blocks_are_not_resident() -> None:
    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    ops = make_ops()
    before = resident()
    group = KVGroupSpec(name="g", layers=(0, 1), num_kv_heads=8, head_dim=128)
    ops.allocate_kv([group], 4096, 16)  # 1 GiB
    assert resident() - before < 16 << 10


def test_head_sizes_the_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="'g' has 24"):
        make_ops().allocate_kv(
            [KVGroupSpec(name="g", layers=(0,), num_kv_heads=1, head_dim=24)], 1, 16
        )


def test_available_memory_heeds_every_cgroup_level(tmp_path: Any) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert available_memory(tmp_path) == 4096 * 1024
    inner = tmp_path / "sys/fs/cgroup/a/b"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, "3000000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("2000000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert available_memory(tmp_path) == 1_500_000


# --- threads ------------------------------------------------------------------------


def test_two_threads_may_step_at_once() -> None:
    """Replicas of one process share the pool of threads: results stay right and nobody dies."""
    rows, x = random_array(4096, 64, seed=1), random_array(40, 64)
    part = WeightPart("lm_head.weight", "f32", rows.shape, rows)
    exact = x.astype(np.float64) @ rows.T.astype(np.float64)

    def work() -> float:
        ops = make_ops()
        held = ops.hold([part])
        ops.plan_step(forward_batch([SequenceStep([0], 0, [0])], block_size=16))
        products = [ops.linear(torch.tensor(x), held) for _ in range(20)]
        return max(float(np.abs(product.numpy() - exact).max()) for product in products)

    with ThreadPoolExecutor(2) as threads:
        for error in [threads.submit(work) for _ in range(4)]:
            assert error.result() < 1e-4
