"""Cost: the blocks still to be prefilled on a replica, this prompt's included, and those being decoded.

    cost = prefill_weight x uncached prefill blocks + active decode blocks

With `temperature` 0 the cheapest has it and equals take turns; above it a replica is drawn with the
probability exp(-cost / temperature), so that several gateways do not all run to the same one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.policies.routing.turns import Turns
from headrace.types import ReplicaView, RoutingRequest


class Cost:
    name: ClassVar[str] = "cost"

    @dataclass(frozen=True, slots=True)
    class Options:
        """What weighs how much."""

        prefill_weight: float = 1.0
        temperature: float = 0.0
        """In blocks; at least 0."""
        seed: int | None = None
        """Makes the draws repeat."""

        def __post_init__(self) -> None:
            for name in ("prefill_weight", "temperature"):
                value = getattr(self, name)
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name} must be at least 0, got {value:g}")

    def __init__(self, options: Options) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._turns = Turns()

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        temperature = self._options.temperature
        if temperature == 0:
            return self._turns.least(
                request.model, replicas, lambda replica: self._cost(request, replica)
            )
        costs = [self._cost(request, replica) for replica in replicas]
        lowest = min(costs)
        weights = [math.exp((lowest - cost) / temperature) for cost in costs]
        return self._random.choices(replicas, weights)[0].id

    def _cost(self, request: RoutingRequest, replica: ReplicaView) -> float:
        uncached = max(0, request.num_prompt_tokens - replica.matched_tokens)
        prefill_blocks = (replica.num_prefill_tokens + uncached) / replica.block_size
        return self._options.prefill_weight * prefill_blocks + replica.num_active_blocks
