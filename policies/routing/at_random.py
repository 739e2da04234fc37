"""Random: every replica with the same probability. What other policies are measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.types import ReplicaView, RoutingRequest


class AtRandom:
    name: ClassVar[str] = "random"

    @dataclass(frozen=True, slots=True)
    class Options:
        """`seed` makes the draws repeat; without one they differ from start to start."""

        seed: int | None = None

    def __init__(self, options: Options) -> None:
        self._random = random.Random(options.seed)

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return self._random.choice(replicas).id
