"""The NumPy operations against independent computations of the same things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.interfaces import AttentionSpec, Ops
from headrace.testing.numpy_ops import NumpyOps
from headrace.types import KVGroupSpec, WeightPart

BLOCK_SIZE = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
Array = np.ndarray[Any, np.dtype[np.float64]]


def random_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def group(window: int | None = None) -> KVGroupSpec:
    return KVGroupSpec(
        name="g", layers=(0,), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=window
    )


def spec(window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, 0.3, sliding_window=window, softcap=softcap)


def identity_table(ops: NumpyOps) -> Any:
    """A rope that rotates nothing."""
    return ops.rope_table(np.zeros(HEAD_DIM // 2), 1.0, 64)


def attend_plainly(
    q: Array, k: Array, v: Array, window: int | None = None, softcap: float | None = None
) -> Array:
    """Attention of the last len(q) of len(k) tokens, one query and head at a time."""
    out = np.zeros((len(q), HEADS, HEAD_DIM))
    for index in range(len(q)):
        last = len(k) - len(q) + index
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = 0.3 * k[first : last + 1, kv_head] @ q[index, head]
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[index, head] = weights / weights.sum() @ v[first : last + 1, kv_head]
    return out.reshape(len(q), -1)


def run_chunks(
    ops: NumpyOps,
    q: Array,
    k: Array,
    v: Array,
    chunks: Sequence[int],
    attention: AttentionSpec,
) -> Array:
    """One sequence through the cache in chunks, on blocks in a shuffled order."""
    ops.allocate_kv([group(attention.sliding_window)], 8, BLOCK_SIZE)
    table, out, done = identity_table(ops), [], 0
    for size in chunks:
        step = ops.plan_step(
            forward_batch([SequenceStep([0] * size, done, [5, 2, 7, 0])], block_size=BLOCK_SIZE)
        )
        part = slice(done, done + size)
        q_rows, k_rows, v_rows = (x[part].reshape(size, -1) for x in (q, k, v))
        rotated = ops.rope_write_kv(q_rows, k_rows, v_rows, table, 0, step)
        out.append(ops.paged_attention(rotated, 0, attention, step))
        done += size
    return np.concatenate(out)


def test_numpy_ops_are_ops() -> None:
    ops: Ops = NumpyOps()
    assert ops.weight_bytes() == 0


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 8], [4, 4, 4, 1]])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (1, None), (None, 0.5)])
def test_paged_attention_equals_plain_attention(
    chunks: list[int], window: int | None, softcap: float | None
) -> None:
    q, k, v = (random_array(13, h, HEAD_DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = run_chunks(NumpyOps(), q, k, v, chunks, spec(window, softcap))
    np.testing.assert_allclose(out, attend_plainly(q, k, v, window, softcap), atol=1e-12)


def test_sequences_of_one_batch_do_not_see_each_other() -> None:
    ops = NumpyOps()
    ops.allocate_kv([group()], 8, BLOCK_SIZE)
    lengths, tables = [5, 0, 1, 3], [[4, 1], [6], [0], [3]]
    steps = [SequenceStep([0] * n, 0, t, ()) for n, t in zip(lengths, tables, strict=True)]
    step = ops.plan_step(forward_batch(steps, block_size=BLOCK_SIZE))
    q, k, v = (random_array(9, h, HEAD_DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    q_rows, k_rows, v_rows = (x.reshape(9, -1) for x in (q, k, v))
    rotated = ops.rope_write_kv(q_rows, k_rows, v_rows, identity_table(ops), 0, step)
    out = ops.paged_attention(rotated, 0, spec(), step)
    expected = [attend_plainly(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 5), (5, 6), (6, 9))]
    np.testing.assert_allclose(out, np.concatenate(expected), atol=1e-12)


def test_a_bias_of_minus_infinity_hides_a_row_from_one_head() -> None:
    ops = NumpyOps()
    q, k, v = (random_array(6, h, HEAD_DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    run_chunks(ops, q, k, v, [6], spec())
    bias = np.zeros((8, BLOCK_SIZE, KV_HEADS))
    bias[5, 1, 0] = -np.inf  # row 1, seen by heads 0 and 1
    bias[5, :, 1] = bias[2, :, 1] = -np.inf  # every row of heads 2 and 3
    ops.layers[0].bias = bias
    step = ops.plan_step(forward_batch([SequenceStep([0], 5, [5, 2])], block_size=BLOCK_SIZE))
    out = ops.paged_attention(q[5:].reshape(1, -1), 0, spec(), step).reshape(HEADS, HEAD_DIM)
    kept = [0, 2, 3, 4, 5]
    expected = attend_plainly(q[5:], k[kept], v[kept]).reshape(HEADS, HEAD_DIM)
    np.testing.assert_allclose(out[:2], expected[:2], atol=1e-12)
    np.testing.assert_array_equal(out[2:], 0)


def test_a_finite_bias_weighs_a_row_like_its_copies() -> None:
    ops = NumpyOps()
    q, k, v = (random_array(3, h, HEAD_DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    run_chunks(ops, q, k, v, [3], spec())
    bias = np.zeros((8, BLOCK_SIZE, KV_HEADS))
    bias[5, 0] = np.log(3)
    ops.layers[0].bias = bias
    step = ops.plan_step(forward_batch([SequenceStep([0], 2, [5])], block_size=BLOCK_SIZE))
    rows = [0, 0, 0, 1, 2]
    np.testing.assert_allclose(
        ops.paged_attention(q[2:].reshape(1, -1), 0, spec(), step),
        attend_plainly(q[2:], k[rows], v[rows]),
        atol=1e-12,
    )


def test_table_entries_past_the_end_are_not_read() -> None:
    ops = NumpyOps()
    ops.allocate_kv([group()], 2, BLOCK_SIZE)
    batch = forward_batch(
        [SequenceStep([0, 0], 0, [1]), SequenceStep([0], 0, [0])], block_size=BLOCK_SIZE
    )
    wide = np.full((1, 2, 9), 1 << 30, np.int32)
    wide[:, :, :1] = batch.block_tables
    step = ops.plan_step(type(batch)(**{**_fields(batch), "block_tables": wide}))
    out = ops.paged_attention(random_array(3, HEADS * HEAD_DIM), 0, spec(), step)
    np.testing.assert_array_equal(out, 0)


def test_rope_pairs_element_i_with_i_plus_half_and_leaves_the_rest() -> None:
    ops = NumpyOps()
    frequencies = np.array([1.0, 0.1, 0.01])
    table = ops.rope_table(frequencies, 1.5, 32)
    x = random_array(2, 3, HEAD_DIM)
    positions = np.array([0, 17], np.int32)
    rotated = ops.rotate(x, table, positions)
    pairs = (x[..., :3] + 1j * x[..., 3:6]) * 1.5
    turned = pairs * np.exp(1j * positions[:, None, None] * frequencies)
    np.testing.assert_allclose(rotated[..., :3], turned.real, atol=1e-12)
    np.testing.assert_allclose(rotated[..., 3:6], turned.imag, atol=1e-12)
    np.testing.assert_array_equal(rotated[..., 6:], x[..., 6:])


def test_norms_and_activations_equal_torch() -> None:
    ops = NumpyOps()
    x, weight = random_array(5, 12), random_array(12, seed=1)
    tensor = torch.from_numpy(x)
    normed = torch.nn.functional.rms_norm(tensor, (12,), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-5), normed, atol=1e-12)
    grouped = torch.nn.functional.rms_norm(
        tensor.reshape(5, 3, 4), (4,), torch.from_numpy(weight[:4]), 1e-5
    )
    np.testing.assert_allclose(
        ops.rms_norm(x, weight[:4], 1e-5, 3), grouped.reshape(5, 12).numpy(), atol=1e-12
    )
    added, total = ops.add_rms_norm(x / 2, x / 2, weight, 1e-5)
    np.testing.assert_allclose(added, normed, atol=1e-12)
    np.testing.assert_allclose(total, x, atol=1e-15)
    gate, up = tensor[:, :6], tensor[:, 6:]
    silu = (torch.nn.functional.silu(gate) * up).numpy()
    gelu = (torch.nn.functional.gelu(gate, approximate="tanh") * up).numpy()
    np.testing.assert_allclose(ops.silu_mul(x), silu, atol=1e-12)
    np.testing.assert_allclose(ops.gelu_mul(x), gelu, atol=1e-12)
    np.testing.assert_allclose(ops.soft_cap(x, 2.0), 2 * np.tanh(x / 2), atol=1e-15)


def test_hold_stacks_parts_of_different_schemes() -> None:
    ops = NumpyOps()
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    parts = [
        WeightPart("a", "f32", (1, 3), whole[:1]),
        WeightPart("b", "f16", (1, 3), whole[1:2].astype(np.float16)),
        WeightPart("c", "bf16", (2, 3), (whole[2:].view(np.uint32) >> 16).astype(np.uint16)),
    ]
    bias = np.array([1, 2, 3, 4], np.float32)
    held = ops.hold(parts, bias)
    x = random_array(2, 3)
    np.testing.assert_allclose(ops.linear(x, held), x @ whole.T + bias, atol=1e-12)
    step = ops.plan_step(forward_batch([SequenceStep([2, 0], 0, [0])], block_size=BLOCK_SIZE))
    np.testing.assert_allclose(ops.embed(held, step, 2.0), whole[[2, 0]] * 2)
    with pytest.raises(ValueError, match="q8_0"):
        ops.hold([WeightPart("d", "q8_0", (1, 32), np.zeros((1, 34), np.uint8))])


def test_tokens_come_from_the_last_draw_where_a_source_says_so() -> None:
    ops = NumpyOps()
    weight = ops.hold([WeightPart("e", "f32", (9, 2), np.eye(9, 2, dtype=np.float32))])
    logits = np.zeros((2, 9))
    logits[0, 8] = logits[1, 1] = 5
    ops.sample(logits, sampling_batch(2), None)
    batch = forward_batch(
        [SequenceStep([7, 7, 7], 0, [0])], block_size=BLOCK_SIZE, token_sources=[1, -1, 0]
    )
    step = ops.plan_step(batch)
    assert step.token_ids.tolist() == [1, 7, 8]
    np.testing.assert_array_equal(ops.embed(weight, step), np.eye(9, 2)[[1, 7, 8]])
    assert batch.token_ids.tolist() == [7, 7, 7]


def test_blocks_and_rows_move_whole() -> None:
    ops = NumpyOps()
    ops.allocate_kv([group()], 3, BLOCK_SIZE)
    keys, values = (random_array(2, KV_HEADS, HEAD_DIM, seed=s).astype(np.float32) for s in (1, 2))
    ops.write_rows(0, [1, 6], keys, values)
    ops.layers[0].bias = np.zeros((3, BLOCK_SIZE, KV_HEADS))
    ops.layers[0].bias[0] = 7
    ops.copy_blocks([(0, 2), (2, 1)])
    read_keys, read_values = ops.read_rows(0, [1, 5, 9])
    for read, written in ((read_keys, keys), (read_values, values)):
        np.testing.assert_array_equal(read, written[[0, 0, 0]])
    assert (ops.layers[0].bias == 7).all()
    assert ops.kv_bytes_per_block([group()], BLOCK_SIZE) == 2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 8


def _fields(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__slots__}
