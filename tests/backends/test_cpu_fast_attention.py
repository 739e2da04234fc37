"""Attention of the CPU fast path against the NumPy oracle, and what may change no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numba
import numpy as np
import pytest
from fast_beside_oracle import BLOCKS, both, settings_for
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.arena import address
from headrace.backends.cpu.fast.intrinsics import LANES, routine
from headrace.backends.cpu.fast.kernels_attend import MAX_VECTORS, SEGMENT_ROWS
from headrace.backends.cpu.fast.kernels_attend_plan import plan_items
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.interfaces import AttentionSpec, LoadedModel
from headrace.testing.small_models import bf16_exact, plain_part, small_model
from headrace.types import KVGroupSpec, WeightPart

Floats = NDArray[np.float32]
VOCAB = 50
RANDOM = np.random.default_rng(11)
TOKENS = RANDOM.integers(0, VOCAB, BLOCKS * 16).tolist()
SCATTERED = np.random.default_rng(3).permutation(BLOCKS).tolist()
KV_DTYPES = {"bfloat16": 0.02, "int8": 0.04}
"""What is tolerated beside results of size 1."""


def attention_model(
    spec: AttentionSpec, rotary: int, *, key_size: float = 1.0, value_size: float = 1.0
) -> LoadedModel:
    """embed -> split -> rope_write_kv -> paged_attention -> take_rows; queries shrink as keys grow."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = np.random.default_rng(spec.head_dim).standard_normal((VOCAB, q_size + 2 * kv_size))
    rows[:, :q_size] /= key_size
    rows[:, q_size : q_size + kv_size] *= key_size
    rows[:, q_size + kv_size :] *= value_size
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
    parts = {"embedding": plain_part("embedding", bf16_exact(rows))}
    return small_model(parts, load, forward, width=q_size, groups=[group])


def mixed_batches(block_size: int) -> list[Any]:
    """Two prompts, then decodes beside the rest of a third, all through scattered tables."""
    per_sequence = -(-170 // block_size)
    tables = [SCATTERED[i * per_sequence : (i + 1) * per_sequence] for i in range(3)]
    prompts = [
        SequenceStep(TOKENS[:131], 0, tables[0]),
        SequenceStep(TOKENS[:1], 0, tables[1]),
        SequenceStep(TOKENS[100:133], 0, tables[2]),
    ]
    following = [
        SequenceStep([7], 131, tables[0]),
        SequenceStep(TOKENS[50:101], 33, tables[2], range(51)),
        SequenceStep([9], 1, tables[1]),
    ]
    return [forward_batch(steps, block_size=block_size) for steps in (prompts, following)]


SPECS = {
    "like SmolLM2": (AttentionSpec(9, 3, 64, 0.125), 64, 16),
    "one head": (AttentionSpec(1, 1, 32, 0.25), 16, 16),
    "window": (AttentionSpec(4, 1, 32, 0.2, sliding_window=20), 32, 32),
    "long window": (AttentionSpec(6, 3, 32, 0.2, sliding_window=450), 32, 16),
    "window of one": (AttentionSpec(2, 2, 16, 0.2, sliding_window=1), 16, 16),
    "capped": (AttentionSpec(4, 2, 80, 0.3, softcap=5.0), 32, 16),
    "many heads share": (AttentionSpec(14, 2, 96, 0.1), 96, 48),
    "wide": (AttentionSpec(4, 1, 256, 0.0625, sliding_window=100), 256, 16),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_mixed_batch(name: str, num_threads: int, kv_dtype: str) -> None:
    spec, rotary, block_size = SPECS[name]
    batches = mixed_batches(block_size)
    model = attention_model(spec, rotary)
    found, expected = both(model, batches, settings_for(num_threads, block_size, kv_dtype))
    assert len(found) == 53
    tolerance = KV_DTYPES[kv_dtype]
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


# --- what changes no bit --------------------------------------------------------

Open = Callable[..., FastRunner]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return `opened(spec name, **settings)`, a runner with a pool; all are closed at the end."""
    made = []

    def make(name: str, **more: Any) -> FastRunner:
        spec, rotary, _ = SPECS[name]
        made.append(FastRunner(attention_model(spec, rotary), SingleRank(), settings_for(**more)))
        made[-1].allocate(BLOCKS)
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def chunk(done: int, size: int, table: Sequence[int] = SCATTERED) -> SequenceStep:
    return SequenceStep(TOKENS[done : done + size], done, table, range(size))


def results(runner: FastRunner, *steps: SequenceStep) -> Floats:
    runner.execute(forward_batch(steps, block_size=16))
    return runner.last_logits()


def cut(runner: FastRunner, sizes: Sequence[int]) -> Floats:
    starts = np.cumsum([0, *sizes])
    steps = [chunk(int(start), size) for start, size in zip(starts, sizes, strict=False)]
    return np.concatenate([results(runner, step) for step in steps])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["like SmolLM2", "long window", "wide"])
def test_a_long_context_depends_on_no_thread_and_no_chunk(
    name: str, kv_dtype: str, opened: Open
) -> None:
    """600 rows are 5 segments, in stretches of 3 where there are 3 KV heads: two threads share a decode's, one
    walks all of them."""
    alone, together = (opened(name, num_threads=n, kv_dtype=kv_dtype) for n in (1, 2))
    expected = cut(alone, [530] + [1] * 70)
    np.testing.assert_array_equal(cut(together, [600]), expected)
    np.testing.assert_array_equal(cut(together, [17, 300, 229, 1, 40, 1, 1, 1, 10]), expected)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    neighbours=st.lists(st.integers(1, 30), max_size=4),
)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decodes_beside_chunks_of_prompts_stay_the_same(
    kv_dtype: str, sizes: list[int], neighbours: list[int]
) -> None:
    """Any cut of 300 tokens with any neighbours in the batch gives the bits of one token at a time."""
    runner = shared_runner(kv_dtype, 2)
    total = min(300, sum(sizes))
    expected = expected_rows(kv_dtype)[:total]
    done, found = 0, []
    for size in sizes:
        size = min(size, total - done)
        if size == 0:
            break
        tables = [[20 + 2 * i, 21 + 2 * i] for i in range(len(neighbours))]
        others = [SequenceStep(TOKENS[:n], 0, t) for n, t in zip(neighbours, tables, strict=True)]
        mine = chunk(done, size, range(20))
        rows = results(runner, *others[:2], mine, *others[2:])
        before = len(others[:2])
        found.append(rows[before : before + size])
        done += size
    np.testing.assert_array_equal(np.concatenate(found), expected)


RUNNERS: dict[tuple[str, int], FastRunner] = {}
EXPECTED: dict[str, Floats] = {}


def shared_runner(kv_dtype: str, num_threads: int) -> FastRunner:
    """A runner that the examples of a property share; closed with the module."""
    key = kv_dtype, num_threads
    if key not in RUNNERS:
        spec, rotary, _ = SPECS["like SmolLM2"]
        RUNNERS[key] = FastRunner(
            attention_model(spec, rotary), SingleRank(),
            settings_for(num_threads=num_threads, kv_dtype=kv_dtype),
        )  # fmt: skip
        RUNNERS[key].allocate(BLOCKS)
    return RUNNERS[key]


def expected_rows(kv_dtype: str) -> Floats:
    if kv_dtype not in EXPECTED:
        EXPECTED[kv_dtype] = cut(shared_runner(kv_dtype, 1), [1] * 300)
    return EXPECTED[kv_dtype]


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    while RUNNERS:
        RUNNERS.popitem()[1].close()


@given(
    queries=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3000)), min_size=1, max_size=9),
    window=st.sampled_from([0, 1, 100, 512]),
    kv_heads=st.sampled_from([1, 3, 8]),
    ratio=st.sampled_from([1, 3, 16, 64]),
    num_threads=st.sampled_from([1, 2, 7]),
)
def test_items_cover_every_query_and_visible_segment_once(
    queries: list[tuple[int, int]], window: int, kv_heads: int, ratio: int, num_threads: int
) -> None:
    counts, lens = zip(*[(n, n + before) for n, before in queries], strict=True)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    items = np.zeros((10_000, at.ITEM_FIELDS), np.int64)
    shape = (window, kv_heads, ratio, 96)
    used, partial, lines = plan_items(starts, np.array(lens, np.int32), shape, num_threads, items)
    seen: dict[tuple[int, int], list[int]] = {}
    places = {}
    for item in items[:used].tolist():
        sequence, first, count = item[: at.FIRST_SEGMENT]
        assert 1 <= count <= max(1, MAX_VECTORS // ratio)
        assert item[at.END_SEGMENT] > item[at.FIRST_SEGMENT]
        for query in range(first, first + count):
            walked = range(item[at.FIRST_SEGMENT], item[at.END_SEGMENT])
            seen.setdefault((sequence, query), []).extend(walked)
        stretch = min(kv_heads, 4)
        assert item[at.FIRST_SEGMENT] in (
            item[at.LOWEST_SEGMENT],
            item[at.FIRST_SEGMENT] // stretch * stretch,
        )
        if item[at.SHARERS] > 1:
            places[item[at.PARTIAL]] = kv_heads * item[at.NUM_STRETCHES] * count * ratio * 96
    for (sequence, query), segments in seen.items():
        row = lens[sequence] - counts[sequence] + query
        needed = range(max(0, row + 1 - window if window else 0), row + 1)
        assert len(set(segments)) == len(segments)
        assert {needed[0] // SEGMENT_ROWS, needed[-1] // SEGMENT_ROWS} <= set(segments)
        assert max(segments) * SEGMENT_ROWS <= row + MAX_VECTORS
    assert len(seen) == sum(counts)
    ends = 0
    for place, size in sorted(places.items()):
        assert place == ends
        ends += size
    assert (partial, lines) == (ends, kv_heads * len(places))


def test_more_items_than_there_is_room_for_are_counted_and_not_written() -> None:
    starts, lens = np.array([0, 400], np.int32), np.array([400], np.int32)
    items = np.full((3, at.ITEM_FIELDS), -1, np.int64)
    used, _, _ = plan_items(starts, lens, (0, 1, 4, 96), 1, items[:2])
    assert used == -(-400 // (MAX_VECTORS // 4))
    assert (items[2] == -1).all() and (items[:2] >= 0).all()


# --- what is not read -----------------------------------------------------------


def poison(runner: FastRunner, slots: Sequence[int], spec: AttentionSpec) -> None:
    broken = np.full((len(slots), spec.num_kv_heads, spec.head_dim), np.nan, np.float32)
    runner.write_rows(0, slots, broken, broken)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_nothing_past_a_sequence_is_read(kv_dtype: str, opened: Open) -> None:
    runner = opened("like SmolLM2", kv_dtype=kv_dtype)
    batches = mixed_batches(16)
    runner.execute(batches[0])
    runner.execute(batches[1])
    clean = runner.last_logits()
    taken = {int(slot) for batch in batches for slot in batch.slots.ravel()}
    spoiled = [slot for slot in range(BLOCKS * 16) if slot not in taken]
    poison(runner, spoiled, SPECS["like SmolLM2"][0])
    runner.execute(batches[1])
    np.testing.assert_array_equal(runner.last_logits(), clean)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("size", [1, 40])
def test_blocks_outside_the_window_are_not_read(kv_dtype: str, size: int, opened: Open) -> None:
    """The engine may give them to others: their table entries then name anything."""
    runner = opened("wide", kv_dtype=kv_dtype)
    spec, window, done = SPECS["wide"][0], 100, 500
    cut(runner, [done])
    expected = results(runner, chunk(done, size))
    outside = (done + 1 - window) // 16
    victim = SCATTERED[-1]
    poison(runner, range(16 * victim, 16 * victim + 16), spec)
    table = [victim] * outside + SCATTERED[outside:]
    np.testing.assert_array_equal(results(runner, chunk(done, size, table)), expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_broken_rows_reach_those_who_see_them_alone(kv_dtype: str, opened: Open) -> None:
    runner = opened("like SmolLM2", kv_dtype=kv_dtype)
    clean = results(runner, chunk(0, 40, [4, 5, 6]), chunk(0, 40, [7, 8, 9]))
    poison(runner, [5 * 16 + 3], SPECS["like SmolLM2"][0])
    found = results(runner, chunk(40, 2, [4, 5, 6]), chunk(39, 1, [7, 8, 9]))
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2], clean[79])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("name", ["like SmolLM2", "capped"])
def test_half_a_broken_row_is_told_too(
    name: str, is_key: bool, kv_dtype: str, opened: Open
) -> None:
    """Q04: a score that is no number must not become a weight of nearly nothing."""
    runner = opened(name, kv_dtype=kv_dtype)
    results(runner, chunk(0, 40, [4, 5, 6]))
    parts = list(runner.read_rows(0, [4 * 16 + 3]))
    parts[0 if is_key else 1][..., 1] = np.nan
    runner.write_rows(0, [4 * 16 + 3], *parts)
    found = results(runner, chunk(40, 2, [4, 5, 6]))
    broken = np.isnan(found).reshape(2, -1, SPECS[name][0].head_dim)
    assert (broken.all(axis=-1) if is_key or kv_dtype == "int8" else broken[..., 1]).all()


@routine()
def raise_two(e: Any, x: Any, out: Any) -> None:
    """out = 2**x, 16 numbers."""
    e.store(e.exp2(e.load(x)), out)


def test_powers_of_two_are_near_or_nothing_and_tell_what_is_no_number() -> None:
    """What is hidden or as good as that weighs nothing, so that values of any size may stand there."""

    @numba.njit  # type: ignore[untyped-decorator]
    def powers(x: int, out: int, count: int) -> None:
        for first in range(0, count, LANES):
            raise_two(x + 4 * first, out + 4 * first)

    x = np.linspace(-100, 20, 4096, dtype=np.float32)
    out = np.empty_like(x)
    powers(address(x), address(out), len(x))
    np.testing.assert_allclose(out, np.exp2(x.astype(np.float64)), rtol=3e-6)
    x = np.array([0, -100.1, -1e30, -np.inf, np.nan, -np.nan, 3, -3] * 2, np.float32)
    out = np.empty_like(x)
    powers(address(x), address(out), len(x))
    np.testing.assert_array_equal(out[:4], [1, 0, 0, 0])
    assert np.isnan(out[4:6]).all() and np.allclose(out[6:8], [8, 0.125], rtol=3e-6)


# --- int8 -----------------------------------------------------------------------


@pytest.mark.parametrize(("key_size", "value_size"), [(500.0, 1e-3), (1e-3, 500.0), (1e-6, 1e6)])
def test_int8_rows_of_any_size_keep_their_relative_error(
    key_size: float, value_size: float
) -> None:
    """Q04: scales come from each row, so that keys of 500 and of 0.001 lose as little as those of 1."""
    spec, rotary, block_size = SPECS["like SmolLM2"]
    model = attention_model(spec, rotary, key_size=key_size, value_size=value_size)
    found, expected = both(model, mixed_batches(block_size), settings_for(kv_dtype="int8"))
    np.testing.assert_allclose(found / value_size, expected / value_size, atol=0.04, rtol=0.04)


def test_int8_rows_read_and_written_again_are_the_same_bits(opened: Open) -> None:
    """Q04: what leaves the pool and comes back is what it was; a copied block is one byte for byte."""
    runner = opened("like SmolLM2", kv_dtype="int8")
    results(runner, chunk(0, 48, range(3)))
    expected = results(runner, chunk(48, 1, range(4)))
    moved = range(30 * 16, 33 * 16)
    runner.write_rows(0, moved, *runner.read_rows(0, range(48)))
    for first, second in zip(
        runner.read_rows(0, range(48)), runner.read_rows(0, moved), strict=True
    ):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(results(runner, chunk(48, 1, [30, 31, 32, 3])), expected)
    runner.copy_blocks([(0, 33), (1, 34), (2, 35)])
    np.testing.assert_array_equal(results(runner, chunk(48, 1, [33, 34, 35, 3])), expected)


def test_int8_takes_a_little_more_than_half_the_memory(opened: Open) -> None:
    plain, small = (opened("like SmolLM2", kv_dtype=kv) for kv in ("bfloat16", "int8"))
    assert plain.memory().kv_bytes_per_block == 16 * 2 * 3 * 64 * 2
    assert small.memory().kv_bytes_per_block == 16 * 2 * 3 * (64 + 4)
    assert small.memory().kv_pool_bytes == BLOCKS * 16 * 2 * 3 * (64 + 4)
