"""Pinned prefixes for a time, tenants within their share, then urgent requests' blocks longest.

What goes first: blocks of a tenant that holds more than its share; then those of the least urgent
priority; within one, the least recently used. Blocks are pinned while a request asked for it
(`cache_ttl`), and, of requests at or above `pinned_priority`, for `ttl` after their last use. Pinned
blocks go last of all, unless their tenant is above its share: a pin is no way around a quota.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from headrace.types import BlockView
from headrace.types.units import Bounds, Seconds, Unit

Share = Annotated[float, Bounds(0.0, 1.0)]


class PriorityAndTime:
    name: ClassVar[str] = "priority_ttl"

    @dataclass(frozen=True, slots=True)
    class Options:
        pinned_priority: int | None = None
        """Requests of this priority or a lower number pin their prompts; null: only those that ask."""
        ttl: Seconds = 300.0
        """How long such a prompt stays pinned after its last use."""
        quotas: Mapping[str, Share] = field(default_factory=dict)
        """Share of the pool, 0 to 1, that a tenant's prefixes may take before they go first."""
        default_quota: Share = 1.0
        """For tenants that `quotas` does not name."""
        recheck: Annotated[float, Unit("duration"), Bounds(0.01, None)] = 5.0
        """How often blocks above a quota are judged again."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()

    def key(self, block: BlockView, now: float) -> tuple[tuple[float, ...], float | None]:
        options = self._options
        quota = options.quotas.get(block.tenant, options.default_quota)
        if block.tenant_share > quota:
            return (0.0, -float(block.priority), block.last_used), now + options.recheck
        pinned_until = block.pinned_until
        if options.pinned_priority is not None and block.priority <= options.pinned_priority:
            pinned_until = max(pinned_until, block.last_used + options.ttl)
        if pinned_until > now:
            return (2.0, -float(block.priority), block.last_used), pinned_until
        return (1.0, -float(block.priority), block.last_used), None
