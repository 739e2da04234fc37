"""Every stored type against the reference of the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from headrace.errors import ModelError
from headrace.models.dequantize import expand, to_float32
from headrace.models.gguf_types import BLOCK_FORMATS, FORMAT_OF_SCHEME, type_name
from headrace.types import WeightPart

BLOCK_SCHEMES = [f.scheme for f in BLOCK_FORMATS.values() if f.block_size > 1]


def _random_blocks(scheme: str, rows: int, blocks_per_row: int) -> np.ndarray:
    """Random bytes whose float16 scales are finite, subnormal and negative ones included."""
    random = np.random.default_rng(7)
    block_format = FORMAT_OF_SCHEME[scheme]
    data = random.integers(0, 256, (rows * blocks_per_row, block_format.block_bytes), np.uint8)
    starts = {"q6_k": [208], "q4_0": [0], "q5_0": [0], "q8_0": [0]}.get(scheme, [0, 2])
    for start in starts:
        data[:, start + 1] &= 0xBB
    return data.reshape(rows, -1)


@pytest.mark.parametrize("scheme", BLOCK_SCHEMES)
@pytest.mark.parametrize("rows", [1, 7, 1200])
def test_block_types_equal_the_reference(scheme: str, rows: int) -> None:
    block_size = FORMAT_OF_SCHEME[scheme].block_size
    data = _random_blocks(scheme, rows, 3)
    expected = quants.dequantize(data, gguf.GGMLQuantizationType[scheme.upper()])
    actual = to_float32(scheme, data, (rows, 3 * block_size))
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == np.float32


@pytest.mark.parametrize("scheme", BLOCK_SCHEMES)
def test_any_slice_of_rows_gives_those_rows(scheme: str) -> None:
    columns = 2 * FORMAT_OF_SCHEME[scheme].block_size
    data = _random_blocks(scheme, 9, 2)
    whole = to_float32(scheme, data, (9, columns))
    np.testing.assert_array_equal(to_float32(scheme, data[3:7], (4, columns)), whole[3:7])


def test_formats_match_the_packages_table() -> None:
    for number, block_format in BLOCK_FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == type_name(number)
        sizes = (block_format.block_size, block_format.block_bytes)
        assert gguf.GGML_QUANT_SIZES[kind] == sizes


def test_plain_types() -> None:
    values = np.array([[1.0, -2.5, 0.0], [3e-5, 65504.0, -0.5]], dtype=np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(
        to_float32("bf16", bf16, values.shape),
        (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    )
    f16 = values.astype(np.float16)
    np.testing.assert_array_equal(to_float32("f16", f16, values.shape), f16.astype(np.float32))


def test_expand_leaves_float32_alone_and_names_what_it_cannot_read() -> None:
    values = np.ones((2, 3), dtype=np.float32)
    part = WeightPart("w", "f32", (2, 3), values)
    assert expand(part) is part
    with pytest.raises(ModelError, match=r"tensor w: type IQ3_S .*Q4_K"):
        expand(WeightPart("w", "iq3_s", (1, 256), np.zeros((1, 110), dtype=np.uint8)))
