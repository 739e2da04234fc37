"""Least recently used: blocks go in the order in which their last holders let go of them."""

from __future__ import annotations

from typing import ClassVar

from headrace.types import BlockView


class LeastRecentlyUsed:
    name: ClassVar[str] = "lru"
    is_release_order: ClassVar[bool] = True

    def key(self, block: BlockView, now: float) -> tuple[float, float | None]:
        return block.last_used, None
