"""Packed products meet few numbers of rows, because oneDNN keeps compiled code for each."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.cpu.weights import can_pack, filled_rows, pack, packed_linear

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="oneDNN is not available in this torch"
)


def test_rows_are_filled_up_to_few_numbers() -> None:
    counts = (1, 3, 16, 17, 64, 65, 129, 512)
    assert [filled_rows(count) for count in counts] == [1, 4, 16, 32, 64, 96, 192, 512]
    assert len({filled_rows(count) for count in range(1, 513)}) <= 16
    for count in range(1, 2000):
        assert count <= filled_rows(count) < 2 * count + (count == 1)


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 31, 33, 127, 129, 300])
def test_filled_rows_change_nothing(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(48, 64, generator=generator), torch.randn(48, generator=generator)
    x = torch.randn(num_rows, 64, generator=generator)
    product = packed_linear(x, pack(weight), bias)
    assert product.shape == (num_rows, 48) and product.is_contiguous()
    assert torch.allclose(product.double(), x.double() @ weight.double().T + bias, atol=1e-4)


@needs_packing
def test_memory_does_not_grow_with_the_numbers_of_rows_met() -> None:
    """K09: 0.3 MB each for hundreds of them was more than many a model."""
    packed = pack(torch.randn(256, 128))
    for num_rows in sorted({filled_rows(count) for count in range(1, 513)}):
        packed_linear(torch.randn(num_rows, 128), packed, None)
    before = anonymous_bytes()
    for num_rows in range(1, 513):
        packed_linear(torch.randn(num_rows, 128), packed, None)
    assert anonymous_bytes() - before < 16 << 20


def anonymous_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return int(status.read().split("RssAnon:")[1].split()[0]) << 10
    except (OSError, IndexError):
        pytest.skip("this system does not tell")
