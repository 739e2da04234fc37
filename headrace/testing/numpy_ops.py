"""Every operation of `headrace.interfaces.Ops` in NumPy, written to be read: the oracle of all backends.

Float64 by default, so that a backend's own rounding is what a comparison shows. The draw is in
`headrace.testing.numpy_sampling`, where its rule is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.interfaces import AttentionSpec
from headrace.testing import numpy_sampling
from headrace.types import (
    ForwardBatch,
    KVGroupSpec,
    SamplingBatch,
    StepResult,
    TokenMasks,
    WeightPart,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.floating]

SQRT_2_OVER_PI = 0.7978845608028654


@dataclass(frozen=True, slots=True)
class NumpyWeight:
    """A linear weight: rows [out, in] and an optional bias [out]."""

    rows: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class NumpyRopeTable:
    """Cosines and sines [max_positions, rotary_dim / 2], the scale multiplied in."""

    cosines: Array
    sines: Array


@dataclass(slots=True)
class NumpyKVLayer:
    """Keys and values [num_blocks, block_size, num_kv_heads, head_dim] of one layer. Mutable."""

    keys: Array
    values: Array
    group: int
    bias: Array | None = None
    """[num_blocks, block_size, num_kv_heads]; set it to give the layer an attention bias plane."""


@dataclass(frozen=True, slots=True)
class NumpyStep:
    """What plan_step returns: nothing needs planning here."""

    batch: ForwardBatch
    token_ids: NDArray[np.int32]
    """[T], with the tokens filled in that the step before drew."""


def plain_rows(part: WeightPart) -> NDArray[np.float32]:
    """Return a part stored as plain numbers in f32."""
    if part.scheme in ("f32", "f16"):
        return part.data.astype(np.float32)
    if part.scheme == "bf16":
        return (part.data.astype(np.uint32) << 16).view(np.float32)
    raise ValueError(
        f"{part.name}: scheme {part.scheme!r} is not held by NumpyOps, which takes f32, f16, bf16; "
        "expand the part first"
    )


def visible_rows(num_queries: int, kv_len: int, sliding_window: int | None) -> NDArray[np.bool_]:
    """Return which rows each query sees, [num_queries, kv_len]: causal, and within the window."""
    last = np.arange(kv_len - num_queries, kv_len)[:, None]
    rows = np.arange(kv_len)[None, :]
    seen = rows <= last
    if sliding_window is not None:
        seen &= rows > last - sliding_window
    return seen


def softmax_or_zeros(scores: Array) -> Array:
    """Return softmax over the last axis; a run that is -inf everywhere gives zeros, not NaN."""
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1, total))


class NumpyOps:
    """Operations on arrays [T, n] of one dtype. Implements headrace.interfaces.Ops."""

    schemes = frozenset({"f32", "f16", "bf16"})

    def __init__(self, dtype: Any = np.float64) -> None:
        self.dtype = np.dtype(dtype)
        self.layers: dict[int, NumpyKVLayer] = {}
        self._held_bytes = 0
        self._drawn = np.zeros(0, np.int32)

    # --- once, at load ----------------------------------------------------------

    def hold(
        self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None
    ) -> NumpyWeight:
        rows = np.concatenate([plain_rows(part) for part in parts]).astype(self.dtype)
        self._held_bytes += rows.nbytes
        return NumpyWeight(rows, None if bias is None else self.hold_vector(bias))

    def hold_vector(self, values: NDArray[np.float32]) -> Array:
        self._held_bytes += values.size * self.dtype.itemsize
        return values.astype(self.dtype)

    def rope_table(
        self, inverse_frequencies: NDArray[np.float64], scale: float, max_positions: int
    ) -> NumpyRopeTable:
        angles = np.arange(max_positions)[:, None] * inverse_frequencies[None, :]
        return NumpyRopeTable(
            (np.cos(angles) * scale).astype(self.dtype), (np.sin(angles) * scale).astype(self.dtype)
        )

    # --- the KV pool ------------------------------------------------------------

    def allocate_kv(self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int) -> None:
        self.layers = {
            layer: NumpyKVLayer(np.zeros(shape, self.dtype), np.zeros(shape, self.dtype), index)
            for index, group in enumerate(groups)
            for shape in [(num_blocks, block_size, group.num_kv_heads, group.head_dim)]
            for layer in group.layers
        }

    def kv_bytes_per_block(self, groups: Sequence[KVGroupSpec], block_size: int) -> int:
        elements = sum(len(g.layers) * g.num_kv_heads * g.head_dim for g in groups)
        return 2 * block_size * elements * int(self.dtype.itemsize)

    def weight_bytes(self) -> int:
        return self._held_bytes

    def available_bytes(self) -> int:
        """No limit that would matter to a test."""
        return 1 << 40

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for layer in self.layers.values():
            for source, target in pairs:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]
                if layer.bias is not None:
                    layer.bias[target] = layer.bias[source]

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keys, values = (_by_slot(plane)[list(slots)] for plane in self._planes(layer))
        return keys.astype(np.float32), values.astype(np.float32)

    def write_rows(self, layer: int, slots: Sequence[int], keys: Any, values: Any) -> None:
        for plane, rows in zip(self._planes(layer), (keys, values), strict=True):
            _by_slot(plane)[list(slots)] = rows

    def _planes(self, layer: int) -> tuple[Array, Array]:
        return self.layers[layer].keys, self.layers[layer].values

    # --- the forward ------------------------------------------------------------

    def plan_step(self, batch: ForwardBatch) -> NumpyStep:
        token_ids = batch.token_ids.copy()
        drawn = batch.token_sources >= 0
        token_ids[drawn] = self._drawn[batch.token_sources[drawn]]
        return NumpyStep(batch, token_ids)

    def embed(self, weight: NumpyWeight, step: NumpyStep, scale: float = 1.0) -> Array:
        return np.asarray(weight.rows[step.token_ids] * self.dtype.type(scale))

    def linear(self, x: Array, weight: NumpyWeight) -> Array:
        product = x @ weight.rows.T
        return product if weight.bias is None else product + weight.bias

    def rms_norm(self, x: Array, weight: Array, eps: float, num_groups: int = 1) -> Array:
        runs = x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups)
        mean_square = np.mean(runs * runs, axis=-1, keepdims=True)
        return np.asarray((runs / np.sqrt(mean_square + eps) * weight).reshape(x.shape))

    def add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def add(self, x: Array, residual: Array) -> Array:
        return np.asarray(x + residual)

    def split(self, x: Array, sizes: Sequence[int]) -> Sequence[Array]:
        return np.split(x, np.cumsum(sizes)[:-1], axis=1)

    def rotate(self, x: Array, table: NumpyRopeTable, positions: NDArray[np.int32]) -> Array:
        """Rotate x [T, heads, head_dim]: element i of the rotary part pairs with i + rotary_dim / 2."""
        cosines = table.cosines[positions][:, None, :]
        sines = table.sines[positions][:, None, :]
        half = cosines.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate(
            [first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1
        )

    def rope_write_kv(
        self, q: Array, k: Array, v: Array, table: NumpyRopeTable, layer: int, step: NumpyStep
    ) -> Array:
        kv = self.layers[layer]
        num_kv_heads, head_dim = kv.keys.shape[2:]
        positions = step.batch.positions
        slots = step.batch.slots[kv.group]
        rotated = self.rotate(k.reshape(-1, num_kv_heads, head_dim), table, positions)
        _by_slot(kv.keys)[slots] = rotated
        _by_slot(kv.values)[slots] = v.reshape(-1, num_kv_heads, head_dim)
        return self.rotate(q.reshape(len(q), -1, head_dim), table, positions).reshape(q.shape)

    def paged_attention(self, q: Array, layer: int, spec: AttentionSpec, step: NumpyStep) -> Array:
        kv, batch = self.layers[layer], step.batch
        block_size = kv.keys.shape[1]
        out = np.zeros((len(q), spec.num_heads, spec.head_dim), self.dtype)
        for index, (first, last) in enumerate(
            zip(batch.query_starts, batch.query_starts[1:], strict=False)
        ):
            if first == last:
                continue
            kv_len = int(batch.kv_lens[kv.group, index])
            rows = np.arange(kv_len)
            blocks = batch.block_tables[kv.group, index, rows // block_size].astype(np.int64)
            slots = blocks * block_size + rows % block_size
            bias = None if kv.bias is None else _by_slot(kv.bias)[slots]
            out[first:last] = attend(
                q[first:last].reshape(-1, spec.num_heads, spec.head_dim),
                _by_slot(kv.keys)[slots],
                _by_slot(kv.values)[slots],
                bias,
                spec,
            )
        return out.reshape(len(q), -1)

    def silu_mul(self, x: Array) -> Array:
        gate, up = np.split(x, 2, axis=1)
        return np.asarray(gate / (1 + np.exp(-gate)) * up)

    def gelu_mul(self, x: Array) -> Array:
        gate, up = np.split(x, 2, axis=1)
        inner = SQRT_2_OVER_PI * (gate + 0.044715 * gate**3)
        return np.asarray(0.5 * gate * (1 + np.tanh(inner)) * up)

    def take_rows(self, x: Array, step: NumpyStep) -> Array:
        return x[step.batch.sample_rows]

    def soft_cap(self, x: Array, cap: float) -> Array:
        return np.asarray(cap * np.tanh(x / cap))

    def sample(
        self, logits: Array, sampling: SamplingBatch, masks: TokenMasks | None
    ) -> StepResult:
        result = numpy_sampling.sample(logits, sampling, masks)
        self._drawn = result.token_ids
        return result

    def synchronize(self) -> None:
        """Nothing is ever in flight."""


def attend(q: Array, keys: Array, values: Array, bias: Array | None, spec: AttentionSpec) -> Array:
    """Attention of one sequence: q [n, heads, d] over rows [kv_len, kv_heads, d] -> [n, heads, d].

    `bias` is [kv_len, kv_heads]. Query head h reads kv head h // (heads / kv_heads).
    """
    ratio = spec.num_heads // spec.num_kv_heads
    scores = spec.scale * np.einsum("nhd,khd->hnk", q, np.repeat(keys, ratio, axis=1))
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + np.repeat(bias, ratio, axis=1).T[:, None, :]
    seen = visible_rows(len(q), len(keys), spec.sliding_window)
    weights = softmax_or_zeros(np.where(seen[None], scores, -np.inf))
    return np.asarray(np.einsum("hnk,khd->nhd", weights, np.repeat(values, ratio, axis=1)))


def _by_slot(plane: Array) -> Array:
    """View a plane [num_blocks, block_size, ...] as [slots, ...]."""
    return plane.reshape(-1, *plane.shape[2:])
