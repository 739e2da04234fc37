"""Sizes and durations as people write them, and the markers that say a field holds one.

`Bytes` and `Seconds` are plain int and float to whoever reads them; the marker makes configuration
and a plugin's `Options` accept "2GiB" and "500ms". 1K is 1000 and 1Ki is 1024, with or without the B.
"""

from __future__ import annotations

import decimal
import re
from dataclasses import dataclass
from typing import Annotated

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DURATION_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_QUANTITY = re.compile(r"\s*([0-9]{1,309}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks a field: "size" (bytes) or "duration" (seconds)."""

    kind: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """Marks a number: the least and the greatest value allowed; None: no bound."""

    low: float | None = None
    high: float | None = None


Bytes = Annotated[int, Unit("size")]
Seconds = Annotated[float, Unit("duration")]


def parse_size(text: str) -> int:
    """Return bytes. ValueError where `text` is no size."""
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower().removesuffix("b") if match else None
    if match is None or unit not in _SIZE_UNITS:
        raise ValueError(
            "a size: bytes, or a number with KB, MB, GB, KiB, MiB or GiB, such as 2GiB"
        )
    size = decimal.Decimal(match[1]) * _SIZE_UNITS[unit]
    if "." not in match[1]:
        return int(match[1]) * _SIZE_UNITS[unit]
    return int(size)


def parse_duration(text: str) -> float:
    """Return seconds. ValueError where `text` is no duration."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError("a duration: a number with us, ms, s, m, h or d, such as 500ms")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def format_size(size: int) -> str:
    """Return the shortest text that parse_size turns back into `size`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _SIZE_UNITS[unit.lower().removesuffix("b")]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def about_size(size: int) -> str:
    """Return a size as people read it, in four digits at most: 139.8GiB. parse_size takes it too."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        number = size / _SIZE_UNITS[unit.lower().removesuffix("b")]
        if number >= 1:
            return f"{number:.4g}{unit}"
    return str(size)


def format_duration(seconds: float) -> str:
    """Return text that parse_duration turns back into `seconds`."""
    if seconds and seconds < 1 and round(seconds * 1000) * 1e-3 == seconds:
        return f"{round(seconds * 1000)}ms"
    text = f"{decimal.Decimal(repr(seconds)):f}"
    return text.removesuffix(".0") + "s"
