"""Cases of the row operations, the quantized product and the draw, with the oracle's answers.

Each check takes the kernels of a backend and raises AssertionError where they and the oracle differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from headrace.backends.batches import sampling_batch
from headrace.backends.gpu.draw import fetch_result, upload_draw
from headrace.backends.gpu.kernels import GELU_TANH, SILU, Kernels, QuantizedWeight
from headrace.backends.torch_kv_pool import KVLayer, gather_rows, quantize_rows
from headrace.testing import numpy_sampling
from headrace.testing.numpy_ops import NumpyOps, NumpyRopeTable
from headrace.types import SamplingBatch, TokenMasks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-10, F32: 2e-6, FP8: 2.0**-3, INT8: 2.0**-6}
"""Of one number, with room for the arithmetic before it."""


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(*shape, generator=generator, device="cpu") * scale
    return made.to(torch.get_default_device())


def assert_close(got: torch.Tensor, expected: np.ndarray[Any, Any], dtype: torch.dtype) -> None:
    difference = np.abs(got.double().cpu().numpy() - expected)
    share = 0.3 if dtype == INT8 else 0.01  # int8 codes are equally far apart
    bound = ROUNDING[dtype] * (np.abs(expected) + share * np.abs(expected).max(initial=0))
    assert (difference <= bound).all(), f"off by {difference.max()}"


def check_norm(kernels: Kernels, dtype: torch.dtype, size: int, num_groups: int = 1) -> None:
    """rms_norm of strided rows; a row with NaN leaves its neighbours alone."""
    wide = numbers(3, size * num_groups + 16).to(dtype)
    x = wide[:, 8 : 8 + size * num_groups]
    weight = numbers(size, seed=1)
    expected = NumpyOps().rms_norm(
        x.double().cpu().numpy(), weight.double().cpu().numpy(), 1e-5, num_groups
    )
    x[1, 3] = torch.nan
    out = torch.full((3, size * num_groups), torch.nan, dtype=dtype)
    kernels.rms_norm(x, None, weight, 1e-5, num_groups, out)
    assert out[1, :size].isnan().all()
    assert_close(out[[0, 2]], expected[[0, 2]], dtype)


def check_add_norm(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (
        numbers(2, size).to(dtype),
        numbers(2, size, seed=1),
        numbers(size, seed=2),
    )
    expected = NumpyOps().add_rms_norm(
        x.double().cpu().numpy(),
        residual.double().cpu().numpy(),
        weight.double().cpu().numpy(),
        1e-6,
    )
    out = torch.full_like(x, torch.nan)
    kernels.rms_norm(x, residual, weight, 1e-6, 1, out)
    assert_close(residual, expected[1], F32)
    assert_close(out, expected[0], dtype)


def check_gate(kernels: Kernels, dtype: torch.dtype, size: int, activation: int) -> None:
    x = numbers(3, 2 * size, scale=3).to(dtype)
    x[0, :2] = torch.tensor([90.0, -90.0]).to(dtype)
    oracle = {SILU: NumpyOps().silu_mul, GELU_TANH: NumpyOps().gelu_mul}[activation]
    with np.errstate(over="ignore"):
        expected = oracle(x.double().cpu().numpy())
    out = torch.full((3, size), torch.nan, dtype=dtype)
    kernels.gate(x, activation, out)
    assert_close(out, expected, dtype)


def check_rope_write(
    kernels: Kernels, stored: torch.dtype, head_dim: int, half: int, dtype: torch.dtype = BF16
) -> None:
    """Rotation and write into shuffled slots; slot -1 writes nothing; unnamed slots keep what they held."""
    heads, kv_heads, tokens, num_slots = 3, 2, 4, 32
    qkv = numbers(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = torch.split_with_sizes(qkv, sizes, dim=1)
    angles = np.outer(np.arange(50), 1.0 / (np.arange(half) + 1))
    table = NumpyRopeTable(np.cos(angles), np.sin(angles))
    cosines, sines = (torch.tensor(part, dtype=F32) for part in (table.cosines, table.sines))
    positions, slots = np.array([5, 0, 49, 7], np.int32), np.array([17, -1, 3, 30])
    kv = _empty_layer(stored, num_slots, kv_heads, head_dim)
    out = torch.full((tokens, heads * head_dim), torch.nan, dtype=dtype)
    where = torch.tensor(positions), torch.tensor(slots)
    kernels.rope_write_kv((q, k, v), (cosines, sines), kv, *where, out)
    ops = NumpyOps()
    rotated = [
        ops.rotate(x.double().cpu().numpy().reshape(tokens, -1, head_dim), table, positions)
        for x in (q, k)
    ]
    assert_close(out, rotated[0].reshape(tokens, -1), dtype)
    written = [0, 2, 3]
    chosen = torch.tensor(slots[written])
    values = v.double().cpu().numpy().reshape(tokens, kv_heads, head_dim)
    for plane, scale, expected in (
        (kv.keys, kv.key_scale, rotated[1][written]),
        (kv.values, kv.value_scale, values[written]),
    ):
        got = gather_rows(plane, scale, chosen)
        if (
            scale is not None
        ):  # codes are those of the torch rule, but where rounding is a coin's edge
            codes, scales = quantize_rows(torch.tensor(expected, dtype=F32), stored)
            again = codes.float() * scales[..., None]
            assert ((got - again).abs() < 1e-5).double().mean() > 0.98
        assert_close(got, expected, stored)
        rest = [slot for slot in range(num_slots) if slot not in slots]
        assert (plane.view(torch.uint8).view(num_slots, -1)[rest] == 0).all()


def _empty_layer(stored: torch.dtype, num_slots: int, kv_heads: int, head_dim: int) -> KVLayer:
    shape = (num_slots // 16, 16, kv_heads)
    planes = [torch.zeros(*shape, head_dim, dtype=stored) for _ in range(2)]
    scales = [torch.zeros(shape) if stored in (FP8, INT8) else None for _ in range(2)]
    return KVLayer(planes[0], planes[1], 0, scales[0], scales[1])


def check_quantized_linear(
    kernels: Kernels, bits: int, tokens: int, sizes: tuple[int, int], dtype: torch.dtype = BF16
) -> None:
    out_size, in_size = sizes
    random = np.random.default_rng(bits)
    x = numbers(tokens, in_size).to(dtype)
    scales = (random.random((out_size, in_size // 32)) * 0.1).astype(np.float16)
    bias = numbers(out_size, seed=3) if tokens % 2 else None
    minima = None
    if bits == 8:
        codes: np.ndarray[Any, Any] = random.integers(-127, 128, (out_size, in_size)).astype(
            np.int8
        )
        plain = codes * np.repeat(scales, 32, axis=1).astype(np.float64)
    else:
        values = random.integers(0, 16, (out_size, in_size // 32, 32)).astype(np.uint8)
        codes = (values[..., :16] | values[..., 16:] << 4).reshape(out_size, -1)
        minima = random.standard_normal(scales.shape).astype(np.float16)
        plain = values.reshape(out_size, -1) * np.repeat(scales, 32, axis=1).astype(np.float64)
        plain += np.repeat(minima, 32, axis=1)
    expected = x.double().cpu().numpy() @ plain.T + (
        0 if bias is None else bias.double().cpu().numpy()
    )
    weight = QuantizedWeight(
        torch.tensor(codes), torch.tensor(scales),
        None if minima is None else torch.tensor(minima), bias, in_size,
    )  # fmt: skip
    out = torch.full((tokens, out_size), torch.nan, dtype=dtype)
    kernels.quantized_linear(x, weight, out)
    assert_close(out, expected, dtype)


def check_draw(
    kernels: Kernels,
    logits: np.ndarray[Any, np.dtype[np.float32]],
    sampling: SamplingBatch,
    masks: TokenMasks | None = None,
) -> None:
    """Tokens, failures and the listed ids are the oracle's exactly; log probabilities to 2e-5."""
    expected = numpy_sampling.sample(logits, sampling, masks)
    on_device = torch.tensor(logits)
    draw = upload_draw(sampling, masks, logits.shape[1], on_device.device)
    kernels.sample(on_device, draw)
    got = fetch_result(draw)
    np.testing.assert_array_equal(got.failed, expected.failed)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    assert np.array_equal(on_device.cpu().numpy(), logits, equal_nan=True), (
        "logits are left as they are"
    )
    if expected.logprobs is None:
        assert got.logprobs is None
        return
    np.testing.assert_array_equal(got.top_token_ids, expected.top_token_ids)
    for mine, theirs in (
        (got.logprobs, expected.logprobs),
        (got.top_logprobs, expected.top_logprobs),
    ):
        assert mine is not None and theirs is not None
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def draw_columns(num_rows: int, seed: int = 0, **fixed: Any) -> dict[str, Any]:
    """Random temperatures, filters, seeds and positions, a few of each off."""
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        "temperature": random.choice([0, 0.3, 1, 1.7], num_rows),
        "top_k": random.choice([0, 1, 5, 40, 10**6], num_rows),
        "top_p": random.choice([1, 0.9, 0.3, 0.0], num_rows),
        "min_p": random.choice([0, 0.05, 0.9], num_rows),
        "seeds": random.integers(0, 2**64, num_rows, dtype=np.uint64),
        "positions": random.integers(0, 10**6, num_rows),
    }
    return columns | fixed


def _random_logits(rows: int, vocab: int, scale: float = 3.0) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(rows * vocab)
    return (random.standard_normal((rows, vocab)) * scale).astype(np.float32)


def draw_filters(kernels: Kernels) -> None:
    check_draw(kernels, _random_logits(12, 1003), sampling_batch(12, draw_columns(12)))


def draw_large_vocabulary(kernels: Kernels) -> None:
    """Several blocks share a row."""
    check_draw(kernels, _random_logits(4, 20_000), sampling_batch(4, draw_columns(4, 3)))


def draw_ties(kernels: Kernels) -> None:
    """Many equal logits: every cut falls inside a run of them, and ids decide. -0 equals 0."""
    random = np.random.default_rng(5)
    logits = random.choice(np.array([0.0, -0.0, 1.0, 2.0], np.float32), (12, 800))
    columns = draw_columns(12, 6, num_logprobs=np.array([20, 7, -1, 0] * 3))
    check_draw(kernels, logits, sampling_batch(12, columns))


def draw_adjusted(kernels: Kernels) -> None:
    """Penalties, bias and masks, some on rows that only score; a mask that leaves nothing fails its row."""
    vocab, rows = 500, 8
    random = np.random.default_rng(8)
    columns = draw_columns(
        rows, 9,
        presence_penalty=random.choice([0, 0.5], rows), frequency_penalty=random.choice([0, 0.7], rows),
        repetition_penalty=random.choice([1, 1.4], rows), num_logprobs=np.array([5, -1] * 4),
        score_token_ids=np.array([-1, -1, 3, -1, -1, -1, 17, -1]),
    )  # fmt: skip
    history = [{int(t): int(t) % 3 for t in random.choice(vocab, 30, False)} for _ in range(rows)]
    bias = [{int(t): 4.0 for t in random.choice(vocab, 5, False)} for _ in range(rows)]
    bias[1][4] = -np.inf
    history[3], bias[3] = {}, {}
    bits = random.integers(-(2**31), 2**31, (3, 16)).astype(np.int32)
    bits[2] = 0
    masks = TokenMasks(np.array([0, 5, 7], np.int32), bits)
    sampling = sampling_batch(rows, columns, histories=history, biases=bias)
    check_draw(kernels, _random_logits(rows, vocab), sampling, masks)


def draw_small(kernels: Kernels) -> None:
    """Every pass over two short rows: what a thread sanitizer has time for."""
    columns: dict[str, Any] = {
        "temperature": [0.9, 1.2], "top_k": [40, 0], "top_p": [0.9, 0.7], "num_logprobs": [3, -1],
        "repetition_penalty": [1.3, 1.0], "presence_penalty": [0.5, 0.0], "seeds": [3, 4],
    }  # fmt: skip
    history = [{token: token % 2 for token in range(0, 150, 3)}, {}]
    bias = [{token: -1.0 for token in range(0, 150, 2)}, {}]
    sampling = sampling_batch(2, columns, histories=history, biases=bias)
    check_draw(kernels, _random_logits(2, 150), sampling)


def draw_broken_rows(kernels: Kernels) -> None:
    """NaN, no finite logit and +inf fail their own rows; -inf among others does not."""
    logits = _random_logits(6, 300)
    logits[0, 250] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = np.inf
    logits[3, ::2] = -np.inf
    logits[4] = 1e30
    columns = draw_columns(6, 11, num_logprobs=np.full(6, 4), top_p=np.full(6, 0.8))
    check_draw(kernels, logits, sampling_batch(6, columns))


def draw_whole_vocabulary_listed(kernels: Kernels) -> None:
    """A vocabulary smaller than the list; greedy beside drawn."""
    columns = draw_columns(5, 12, num_logprobs=np.full(5, 20))
    check_draw(kernels, _random_logits(5, 13), sampling_batch(5, columns))


DRAW_CASES: Mapping[str, Callable[[Kernels], None]] = {
    check.__name__: check
    for check in (
        draw_filters, draw_small, draw_large_vocabulary, draw_ties, draw_adjusted, draw_broken_rows,
        draw_whole_vocabulary_listed,
    )
}  # fmt: skip

ROW_CASES: Mapping[str, Callable[[Kernels], None]] = {
    "norm": lambda k: check_norm(k, BF16, 576),
    "norm, long": lambda k: check_norm(k, BF16, 2304),
    "norm, f32, odd size": lambda k: check_norm(k, F32, 75),
    "norm per head": lambda k: check_norm(k, BF16, 64, num_groups=3),
    "add and norm": lambda k: check_add_norm(k, BF16, 576),
    "silu": lambda k: check_gate(k, BF16, 96, SILU),
    "silu, odd size": lambda k: check_gate(k, BF16, 75, SILU),
    "gelu": lambda k: check_gate(k, BF16, 96, GELU_TANH),
    "rope": lambda k: check_rope_write(k, BF16, 64, 32),
    "rope, part of a head, float16": lambda k: check_rope_write(k, F16, 80, 16, F16),
    "rope, fp8": lambda k: check_rope_write(k, FP8, 128, 64),
    "rope, int8": lambda k: check_rope_write(k, INT8, 96, 48),
    "linear int8": lambda k: check_quantized_linear(k, 8, 1, (10, 576)),
    "linear int4": lambda k: check_quantized_linear(k, 4, 3, (7, 1056)),
    "linear int8, 8 tokens": lambda k: check_quantized_linear(k, 8, 8, (5, 64)),
}
