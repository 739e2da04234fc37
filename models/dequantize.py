"""Turns stored weights into float32 rows: plain floats and GGML's block types.

Works on any slice of rows and in chunks that stay in cache, straight into the result, so that a
weight is never in memory twice. Formats: ggml-quants.h of llama.cpp; results equal its reference
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.gguf_types import FORMAT_OF_SCHEME, SUPPORTED_TYPES
from headrace.types import WeightPart

_CHUNK_ELEMENTS = 1 << 18
_PLAIN_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
)

Blocks = NDArray[np.uint8]
"""[num_blocks, block_bytes] u1."""
Floats = NDArray[np.float32]


def expand(part: WeightPart) -> WeightPart:
    """Return `part` as float32 rows; a part that already is float32 is returned unchanged."""
    if part.scheme == "f32":
        return part
    values = to_float32(part.scheme, part.data, part.shape, part.name)
    return WeightPart(part.name, "f32", part.shape, values)


def to_float32(scheme: str, data: NDArray[Any], shape: tuple[int, ...], name: str = "") -> Floats:
    """Return stored rows as float32: `shape` [rows, n] (or [n]) f32."""
    if scheme in _PLAIN_DTYPES:
        return _plain_to_float32(scheme, data).reshape(shape)
    convert = _BLOCK_TYPES.get(scheme)
    if convert is None:
        raise ModelError(
            f"tensor {name}: type {scheme.upper()} is not supported; supported are {SUPPORTED_TYPES}"
        )
    block_format = FORMAT_OF_SCHEME[scheme]
    columns = shape[-1]
    rows = data.reshape(-1, columns // block_format.block_size * block_format.block_bytes)
    out = np.empty((rows.shape[0], columns), dtype=np.float32)
    rows_at_once = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows.shape[0], rows_at_once):
        chunk = rows[start : start + rows_at_once].reshape(-1, block_format.block_bytes)
        target = out[start : start + rows_at_once].reshape(-1, block_format.block_size)
        convert(chunk, target)
    return out.reshape(shape)


def _plain_to_float32(scheme: str, data: NDArray[Any]) -> Floats:
    if scheme == "bf16":
        widened = data.astype(np.uint32)
        np.left_shift(widened, 16, out=widened)
        return widened.view(np.float32)
    return data.astype(np.float32, copy=False)


def _half(blocks: Blocks, start: int) -> Floats:
    """The float16 at byte `start` of every block: [num_blocks, 1] f32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks) -> NDArray[np.uint8]:
    """Low nibbles, then high ones: [num_blocks, 2 * bytes] u1."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)


def _fifth_bits(blocks: Blocks, start: int) -> NDArray[np.uint8]:
    """Bit i of the 32-bit word at `start`, moved to bit 4 of element i: [num_blocks, 32] u1."""
    words = np.ascontiguousarray(blocks[:, start : start + 4])
    return np.unpackbits(words, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    values = _nibbles(blocks[:, 2:18]).view(np.int8) - np.int8(8)
    np.multiply(values, _half(blocks, 0), out=out)


def _q4_1(blocks: Blocks, out: Floats) -> None:
    np.multiply(_nibbles(blocks[:, 4:20]), _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _q5_0(blocks: Blocks, out: Floats) -> None:
    values = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)
    np.multiply(values.view(np.int8) - np.int8(16), _half(blocks, 0), out=out)


def _q5_1(blocks: Blocks, out: Floats) -> None:
    values = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    np.multiply(values, _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _q8_0(blocks: Blocks, out: Floats) -> None:
    np.multiply(blocks[:, 2:34].view(np.int8), _half(blocks, 0), out=out)


def _k_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minima of a K block, each times its super-scale: [num_blocks, 8, 1] f32."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), axis=1)
    minima = np.concatenate((middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)), axis=1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _k_nibbles(packed: Blocks) -> NDArray[np.uint8]:
    """128 bytes as 8 runs of 32: each 32 bytes give their low nibbles, then their high ones."""
    groups = packed.reshape(-1, 4, 32)
    return np.stack((groups & 0x0F, groups >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks, out: Floats) -> None:
    _scale_and_shift(blocks, _k_nibbles(blocks[:, 16:144]), out)


def _q5_k(blocks: Blocks, out: Floats) -> None:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) << np.uint8(4)
    _scale_and_shift(blocks, _k_nibbles(blocks[:, 48:176]) | fifth, out)


def _scale_and_shift(blocks: Blocks, values: NDArray[np.uint8], out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    target = out.reshape(-1, 8, 32)
    np.multiply(values, scales, out=target)
    np.subtract(target, minima, out=target)


def _q6_k(blocks: Blocks, out: Floats) -> None:
    packed = blocks[:, 0:128].reshape(-1, 2, 64)
    low = np.stack((packed & 0x0F, packed >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 0x03) << 4
    values = (low | high).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    np.multiply(values.reshape(-1, 16, 16), scales[..., None], out=out.reshape(-1, 16, 16))


_BLOCK_TYPES: Mapping[str, Callable[[Blocks, Floats], None]] = MappingProxyType(
    {
        "q4_0": _q4_0,
        "q4_1": _q4_1,
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "q8_0": _q8_0,
        "q4_k": _q4_k,
        "q5_k": _q5_k,
        "q6_k": _q6_k,
    }
)
