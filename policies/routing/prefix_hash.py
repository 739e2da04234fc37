"""Prefix hash: consistent hashing with bounded loads on the prompt's chain of block digests.

The replica that has been sent the longest part of the prompt has it, while its load is under
`load_factor` times the mean. Over that bound nobody has a right to the request: it goes where the fewest
tokens lie before its first own one (those in flight, and those of its prompt not seen there), the same
replica for the same prefix among equals, so that a prefix in great demand gets a second home and not all
of them. The first rule alone would send a request with 20 new tokens away from its 600 cached ones because
of one request ahead of it.

A prompt that nobody has seen (less than `min_match` of it) goes to the least loaded; equals take turns.
The tenant is in the digests: the gateway salts them. Load is work in flight, in tokens, from the gateway's
own ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.policies.routing.turns import Turns, rendezvous_weight
from headrace.types import ReplicaView, RoutingRequest


class PrefixHash:
    name: ClassVar[str] = "prefix_hash"

    @dataclass(frozen=True, slots=True)
    class Options:
        """How uneven the load may become for the sake of a cache, and what counts as a match."""

        load_factor: float = 1.25
        """A replica has a right to its prefixes under this many times the mean load; above 1."""
        min_match: float = 0.25
        """Less than this share of the prompt is no match: every prompt may begin alike."""

        def __post_init__(self) -> None:
            if not self.load_factor > 1:
                raise ValueError(f"load_factor must be above 1, got {self.load_factor:g}")
            if not 0 <= self.min_match <= 1:
                raise ValueError(f"min_match must be between 0 and 1, got {self.min_match:g}")

    def __init__(self, options: Options) -> None:
        self._options = options
        self._turns = Turns()

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        least_match = max(1.0, self._options.min_match * request.num_prompt_tokens)
        warm = [replica for replica in replicas if replica.matched_tokens >= least_match]
        if not warm:
            return self._turns.least(request.model, replicas, lambda replica: replica.num_tokens)
        best = min(
            warm, key=lambda replica: (-replica.matched_tokens, replica.num_tokens, replica.id)
        )
        new_tokens = _new_tokens(request, best) + request.expected_output_tokens
        total = sum(replica.num_tokens for replica in replicas) + new_tokens
        if best.num_tokens < self._options.load_factor * total / len(replicas):
            return best.id
        key = request.prefix_hashes[0] if request.prefix_hashes else b""
        return min(
            replicas,
            key=lambda replica: (
                replica.num_tokens + _new_tokens(request, replica),
                -rendezvous_weight(key, replica.id),
            ),
        ).id


def _new_tokens(request: RoutingRequest, replica: ReplicaView) -> int:
    return max(0, request.num_prompt_tokens - replica.matched_tokens)
