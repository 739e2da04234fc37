"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.types.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1KiB", 1024),
        ("2GiB", 2 << 30),
        ("2 GB", 2 * 10**9),
        ("1.5Mi", 3 << 19),
        ("1tib", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("500ms", 0.5),
        ("250us", 0.00025),
        ("1.5 s", 1.5),
        ("2m", 120),
        ("2min", 120),
        ("1h", 3600),
        ("1d", 86400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 parsec", "1e3", "1,5k", "0x10", "1 2", "１k", "nan"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "10", "ms", "-1s", "1:30", "1 fortnight", "inf", "5 S"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.floats(0, 1e9, allow_nan=False))
def test_a_formatted_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
