"""What each replica is doing for us at this moment, counted by whoever gave it the work.

An engine's own numbers arrive a step late; two requests routed within one step would both see an idle replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Load:
    """The requests in flight on one replica, and the prompt tokens they brought."""

    num_requests: int = 0
    num_tokens: int = 0


class Hold:
    """One request's share of a replica's load. Released once, however often that is asked for."""

    __slots__ = ("_is_held", "_ledger", "_load", "_replica_id")

    def __init__(self, ledger: Ledger, replica_id: str, load: Load) -> None:
        self._ledger = ledger
        self._replica_id = replica_id
        self._load = load
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._ledger._change(self._replica_id, self._load, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()


class Ledger:
    """The load of every replica."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    def load(self, replica_id: str) -> Load:
        return self._loads.get(replica_id, Load())

    def hold(self, replica_id: str, *, num_tokens: int) -> Hold:
        """Count one request of `num_tokens` prompt tokens in until the hold is released."""
        load = Load(1, num_tokens)
        self._change(replica_id, load, 1)
        return Hold(self, replica_id, load)

    def _change(self, replica_id: str, load: Load, sign: int) -> None:
        before = self.load(replica_id)
        after = Load(
            before.num_requests + sign * load.num_requests,
            before.num_tokens + sign * load.num_tokens,
        )
        assert after.num_requests >= 0 and after.num_tokens >= 0
        if after == Load():
            self._loads.pop(replica_id, None)
        else:
            self._loads[replica_id] = after
