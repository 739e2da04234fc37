"""Power of two choices: of two replicas drawn at random the one with fewer tokens in flight.

Nearly as even as asking all of them, and several gateways that see different loads do not all run to the
same replica (Mitzenmacher, 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.types import ReplicaView, RoutingRequest


class PowerOfTwo:
    name: ClassVar[str] = "power_of_two"

    @dataclass(frozen=True, slots=True)
    class Options:
        """`seed` makes the draws repeat; without one they differ from start to start."""

        seed: int | None = None

    def __init__(self, options: Options) -> None:
        self._random = random.Random(options.seed)

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        drawn = self._random.sample(replicas, min(2, len(replicas)))
        return min(drawn, key=lambda replica: replica.num_tokens).id
