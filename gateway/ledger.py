"""What each replica is doing for us at this moment, counted by whoever gave it the work.

An engine's own numbers arrive a step late; two requests routed within one step would both see an idle replica.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from headrace.types import RoutingRequest


class Load(msgspec.Struct, frozen=True):
    """Work in flight on one replica, or one request's part of it."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens still to be computed and output tokens expected."""
    num_prefill_tokens: int = 0
    """The part of num_tokens that is prompt."""
    num_blocks: int = 0
    """KV blocks that the requests can fill."""

    def plus(self, other: Load, sign: int = 1) -> Load:
        return Load(
            self.num_requests + sign * other.num_requests,
            self.num_tokens + sign * other.num_tokens,
            self.num_prefill_tokens + sign * other.num_prefill_tokens,
            self.num_blocks + sign * other.num_blocks,
        )


def load_of(request: RoutingRequest, *, matched_tokens: int, block_size: int) -> Load:
    """Return what a request adds to a replica that has seen `matched_tokens` of its prompt."""
    prefill = max(request.num_prompt_tokens - matched_tokens, min(request.num_prompt_tokens, 1))
    rows = request.num_prompt_tokens + request.expected_output_tokens
    return Load(1, prefill + request.expected_output_tokens, prefill, -(-rows // block_size))


class Hold:
    """One request's share of a replica's load. Released once, however often that is asked for."""

    __slots__ = ("_ledger", "_load", "_replica_id", "on_first_news")

    def __init__(self, ledger: Ledger, replica_id: str, load: Load) -> None:
        self._ledger = ledger
        self._replica_id = replica_id
        self._load: Load | None = load
        self.on_first_news: Callable[[], None] | None = None
        """Called once, when the first token is there."""

    def prefilled(self) -> None:
        """The first token is there: the prompt is no work any more. A second call does nothing."""
        if self.on_first_news is not None:
            tell, self.on_first_news = self.on_first_news, None
            tell()
        if self._load is not None and self._load.num_prefill_tokens:
            done = Load(0, self._load.num_prefill_tokens, self._load.num_prefill_tokens, 0)
            self._ledger._change(self._replica_id, done, -1)
            self._load = self._load.plus(done, -1)

    def release(self) -> None:
        if self._load is not None:
            self._ledger._change(self._replica_id, self._load, -1)
            self._load = None

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
    """The load of every replica, and the KV blocks that admission has reserved there."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._reserved: dict[str, int] = {}

    def load(self, replica_id: str) -> Load:
        return self._loads.get(replica_id, Load())

    def hold(self, replica_id: str, load: Load) -> Hold:
        """Count a request's load in until the hold is released."""
        self._change(replica_id, load, 1)
        return Hold(self, replica_id, load)

    def reserved_blocks(self, replica_id: str) -> int:
        return self._reserved.get(replica_id, 0)

    def reserve(self, replica_id: str, num_blocks: int) -> None:
        """Reserve KV blocks, or give them back where `num_blocks` is below 0."""
        after = self._reserved.get(replica_id, 0) + num_blocks
        assert after >= 0, f"{replica_id}: more blocks given back than were reserved"
        if after:
            self._reserved[replica_id] = after
        else:
            self._reserved.pop(replica_id, None)

    def _change(self, replica_id: str, load: Load, sign: int) -> None:
        after = self.load(replica_id).plus(load, sign)
        assert after.num_requests >= 0 and after.num_tokens >= 0
        if after == Load():
            self._loads.pop(replica_id, None)
        else:
            self._loads[replica_id] = after
