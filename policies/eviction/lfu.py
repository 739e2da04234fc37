"""Least frequently used, with age: a block found twice as often is kept `half_life` longer.

The value is log2(1 + hits) + last use / half_life: hits that halve every `half_life`, compared at the
last use. It changes only when the block is used, so nothing has to be asked again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headrace.types import BlockView
from headrace.types.units import Bounds, Unit


class LeastFrequentlyUsed:
    name: ClassVar[str] = "lfu"

    @dataclass(frozen=True, slots=True)
    class Options:
        half_life: Annotated[float, Unit("duration"), Bounds(0.001, None)] = 600.0
        """After so long unused, a block's hits count half."""

    def __init__(self, options: Options | None = None) -> None:
        self._half_life = (options or self.Options()).half_life

    def key(self, block: BlockView, now: float) -> tuple[float, float | None]:
        return math.log2(1 + block.hits) + block.last_used / self._half_life, None
