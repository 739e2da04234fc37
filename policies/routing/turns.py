"""What several routing policies share: fair turns among equals, and a stable order of replicas per key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from headrace.types import ReplicaView


class Turns:
    """Takes turns among those that are equally good, in order of id, for each model by itself.

    The last id is remembered rather than a position, so that a replica that leaves or joins does not
    make the others skip a turn.
    """

    def __init__(self) -> None:
        self._last_ids: dict[str, str] = {}

    def next(self, model: str, replica_ids: Iterable[str]) -> str:
        """Return the one after the last."""
        ids = sorted(replica_ids)
        last_id = self._last_ids.get(model, "")
        chosen = next((replica_id for replica_id in ids if replica_id > last_id), ids[0])
        self._last_ids[model] = chosen
        return chosen

    def least(
        self, model: str, replicas: Sequence[ReplicaView], cost: Callable[[ReplicaView], float]
    ) -> str:
        """Return the one that costs least; equals take turns."""
        costs = [cost(replica) for replica in replicas]
        lowest = min(costs)
        return self.next(
            model,
            (each.id for each, its_cost in zip(replicas, costs, strict=True) if its_cost == lowest),
        )


def rendezvous_weight(key: bytes, replica_id: str) -> int:
    """Return the weight of a replica for a key: the heaviest one has it (rendezvous hashing).

    When a replica leaves, only the keys it had move; when one joins, it takes an equal share of each.
    """
    digest = hashlib.blake2b(replica_id.encode() + b"\0" + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
