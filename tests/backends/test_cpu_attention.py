"""The CPU's paged attention against the float64 oracle: shapes, dtypes, masks, and what must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.ops import CpuOps
from headrace.interfaces import AttentionSpec
from headrace.testing.numpy_ops import NumpyOps
from headrace.types import EngineSettings, ForwardBatch, KVGroupSpec

NUM_BLOCKS = 40
Array = np.ndarray[Any, np.dtype[Any]]
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-6, "float16": 2e-6}


class Pair:
    """The same KV contents in the CPU's pool and in the oracle's; what no sequence owns holds NaN."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        kv_dtype: str = "float32",
        block_size: int = 16,
        num_threads: int = 2,
        magnitude: float = 1.0,
    ) -> None:
        group = KVGroupSpec(
            name="g", layers=(0,), num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        settings = EngineSettings(dtype="float32", kv_dtype=kv_dtype, num_threads=num_threads)
        self.spec, self.block_size, self.magnitude = spec, block_size, magnitude
        self.cpu, self.oracle = CpuOps(settings), NumpyOps()
        for ops in (self.cpu, self.oracle):
            ops.allocate_kv([group], NUM_BLOCKS, block_size)
        layer = self.cpu.layers[0]
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))

    def fill(self, steps: Sequence[SequenceStep], seed: int = 0) -> None:
        """Give every row of every sequence random keys and values that the storage holds exactly."""
        rng = np.random.default_rng(seed)
        layer, oracle = self.cpu.layers[0], self.oracle.layers[0]
        for step in steps:
            for row in range(step.num_computed + len(step.token_ids)):
                block, offset = step.block_ids[row // self.block_size], row % self.block_size
                for plane, exact in ((layer.keys, oracle.keys), (layer.values, oracle.values)):
                    values = rng.standard_normal(plane.shape[2:]) * self.magnitude
                    plane[block, offset] = torch.tensor(values).to(plane.dtype)
                    exact[block, offset] = plane[block, offset].double().numpy()

    def bias(self, plane: Array) -> None:
        """Give the layer a bias plane [num_blocks, block_size, num_kv_heads]."""
        self.cpu.layers[0].bias = torch.tensor(plane, dtype=torch.float32)
        self.oracle.layers[0].bias = plane.astype(np.float64)

    def run(self, batch: ForwardBatch, q: Array) -> tuple[Array, Array]:
        """Return what the CPU gives and what the oracle gives."""
        step = self.cpu.plan_step(batch)
        given = self.cpu.paged_attention(torch.tensor(q, dtype=torch.float32), 0, self.spec, step)
        exact = self.oracle.paged_attention(
            q.astype(np.float64), 0, self.spec, self.oracle.plan_step(batch)
        )
        return given.float().numpy(), exact


def make_spec(heads: int = 4, kv_heads: int = 2, size: int = 64, **masks: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, size, size**-0.5, **masks)


def queries(spec: AttentionSpec, count: int, seed: int = 1, magnitude: float = 1.0) -> Array:
    shape = (count, spec.num_heads * spec.head_dim)
    values = np.random.default_rng(seed).standard_normal(shape) * magnitude
    return np.asarray(values.astype(np.float32))


def mixed_steps(block_size: int) -> list[SequenceStep]:
    """A decode, a fresh prompt, a chunk behind 21 rows, a lone first token; shuffled blocks."""
    blocks = np.random.default_rng(9).permutation(NUM_BLOCKS).tolist()
    shapes = [(1, 33), (37, 0), (18, 21), (1, 0), (1, 15), (1, 16)]
    steps = []
    for num_queries, done in shapes:
        needed = -(-(num_queries + done) // block_size)
        steps.append(SequenceStep([0] * num_queries, done, blocks[:needed]))
        blocks = blocks[needed:]
    return steps


def check(pair: Pair, steps: Sequence[SequenceStep], tolerance: float = 4e-6) -> None:
    pair.fill(steps)
    batch = forward_batch(steps, block_size=pair.block_size)
    q = queries(pair.spec, len(batch.token_ids), magnitude=pair.magnitude)
    given, exact = pair.run(batch, q)
    assert np.abs(given - exact).max() <= tolerance * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (7, 1), (64, 1)])
def test_equals_the_oracle(size: int, heads: int, kv_heads: int) -> None:
    check(Pair(make_spec(heads, kv_heads, size)), mixed_steps(16))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [8, 16, 20, 32])
def test_storage_types_and_block_sizes(kv_dtype: str, block_size: int) -> None:
    pair = Pair(make_spec(), kv_dtype=kv_dtype, block_size=block_size)
    check(pair, mixed_steps(block_size))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_softcap(window: int, softcap: float | None) -> None:
    check(Pair(make_spec(sliding_window=window, softcap=softcap)), mixed_steps(16))


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_scores_of_any_size(magnitude: float) -> None:
    check(Pair(make_spec(), magnitude=magnitude), mixed_steps(16), 2e-4)


def test_a_window_reads_no_row_outside_it() -> None:
    """Rows before the window may be freed and taken by others: NaN there must not show."""
    pair = Pair(make_spec(sliding_window=20))
    steps = [SequenceStep([0], 63, range(4))]
    pair.fill(steps)
    pair.cpu.layers[0].keys[0:2].fill_(7e3)
    pair.oracle.layers[0].keys[0:2] = 7e3
    batch = forward_batch(steps, block_size=16)
    given, exact = pair.run(batch, queries(pair.spec, 1))
    np.testing.assert_allclose(given, exact, atol=4e-6)


def test_bias_is_added_and_hides_rows_per_head() -> None:
    pair = Pair(make_spec())
    steps = mixed_steps(16)
    rng = np.random.default_rng(3)
    plane = rng.standard_normal((NUM_BLOCKS, 16, 2)).astype(np.float32)
    plane[rng.random(plane.shape) < 0.3] = -np.inf
    pair.bias(plane)
    check(pair, steps)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    pair = Pair(make_spec())
    steps = [SequenceStep([0] * 3, 30, range(3)), SequenceStep([0], 20, range(3, 5))]
    plane = np.zeros((NUM_BLOCKS, 16, 2), np.float32)
    plane[0:3, :, 1] = -np.inf  # all that the first sequence has, for one of two heads
    plane[3, :, 0] = -np.inf  # a whole block of the second
    pair.bias(plane)
    pair.fill(steps)
    given, exact = pair.run(forward_batch(steps, block_size=16), queries(pair.spec, 4))
    np.testing.assert_allclose(given, exact, atol=4e-6)
    assert (given[:3, 2 * 64 :] == 0).all()
    assert np.isfinite(given).all()


# --- what must not matter -----------------------------------------------------------


def chunked(pair: Pair, q: Array, sizes: Sequence[int], blocks: Sequence[int]) -> Array:
    """Attention of one sequence computed in chunks; all its rows are in the pool already."""
    rows, done = [], 0
    for size in sizes:
        batch = forward_batch([SequenceStep([0] * size, done, blocks)], block_size=pair.block_size)
        rows.append(pair.run(batch, q[done : done + size])[0])
        done += size
    return np.concatenate(rows)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masks", [{}, {"sliding_window": 19}, {"softcap": 3.0}])
def test_no_bit_depends_on_chunks_batch_or_threads(kv_dtype: str, masks: dict[str, Any]) -> None:
    spec = make_spec(6, 2, **masks)
    steps = [SequenceStep([0] * 61, 0, [9, 3, 30, 7]), SequenceStep([0] * 5, 40, [1, 2, 4])]
    q = queries(spec, 66)
    pairs = [Pair(spec, kv_dtype=kv_dtype, num_threads=threads) for threads in (1, 2)]
    for pair in pairs:
        pair.fill(steps)
    both = pairs[0].run(forward_batch(steps, block_size=16), q)[0]
    again = pairs[1].run(forward_batch(steps, block_size=16), q)[0]
    assert (both == again).all()
    for sizes in ([61], [1] * 61, [16, 16, 16, 13], [30, 1, 30], [17, 44]):
        alone = chunked(pairs[1], q[:61], sizes, steps[0].block_ids)
        assert (alone == both[:61]).all(), sizes


def test_no_bit_depends_on_block_ids_or_block_size() -> None:
    spec = make_spec()
    q = queries(spec, 50)
    results = []
    for block_size, blocks in ((16, [0, 1, 2, 3]), (16, [8, 2, 31, 5]), (8, range(11, 18))):
        pair = Pair(spec, block_size=block_size)
        pair.fill([SequenceStep([0] * 50, 0, list(blocks))], seed=4)
        results.append(chunked(pair, q, [50], list(blocks)))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()
