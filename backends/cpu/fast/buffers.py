"""Values of a recorded forward, and the few buffers that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Value:
    """What an operation gives, before it has a buffer. Mutable while recording."""

    domain: int
    width: int
    stride: int
    """Bytes from row to row."""
    first_use: int
    """Index of the operation that makes it."""
    last_use: int
    is_read: bool = False
    """As f32, by a later operation."""
    is_changed: bool = False
    """In place, by a later operation."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Which buffer each value has, and what each buffer must hold. Filled by assign_buffers."""

    of_value: dict[int, int]
    domains: list[int]
    row_bytes: list[int]


def assign_buffers(values: Sequence[Value]) -> Buffers:
    """Give values whose lives do not touch the same buffer. A value whose last_use is -1 gets none."""
    buffers = Buffers({}, [], [])
    busy_until: list[int] = []
    order = sorted(range(len(values)), key=lambda index: values[index].first_use)
    for index in order:
        value = values[index]
        if value.last_use < 0:
            continue
        free = [
            number
            for number, until in enumerate(busy_until)
            if until < value.first_use and buffers.domains[number] == value.domain
        ]
        if free:
            chosen = min(free, key=lambda number: abs(buffers.row_bytes[number] - value.stride))
            buffers.row_bytes[chosen] = max(buffers.row_bytes[chosen], value.stride)
        else:
            chosen = len(busy_until)
            busy_until.append(-1)
            buffers.domains.append(value.domain)
            buffers.row_bytes.append(value.stride)
        busy_until[chosen] = max(value.last_use, value.first_use)
        buffers.of_value[index] = chosen
    return buffers
