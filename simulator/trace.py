"""What a simulation serves: requests with their times, lengths and shared prefixes.

A prompt is known by the ids of its 512-token blocks, as in the Mooncake traces: prompts whose ids begin
alike begin with the same tokens. A trace without ids shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at: float
    """Seconds from the start of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One per HASH_BLOCK_TOKENS of the prompt, the last for what is left over; (): it shares nothing."""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times."""

    name: str
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    @property
    def requests_per_second(self) -> float:
        """The rate offered; of a single request or a burst at one moment, that of one per second."""
        return (len(self.requests) - 1) / self.seconds if self.seconds > 0 else 1.0

    def faster(self, factor: float) -> Trace:
        """Return the same requests offered at `factor` times the rate."""
        requests = [replace(request, at=request.at / factor) for request in self.requests]
        return Trace(self.name, requests)

    def with_targets(self, ttft: float | None, tpot: float | None) -> Trace:
        """Return the trace where requests without targets of their own have these."""
        requests = [
            replace(
                request,
                ttft_target_seconds=request.ttft_target_seconds or ttft,
                tpot_target_seconds=request.tpot_target_seconds or tpot,
            )
            for request in self.requests
        ]
        return Trace(self.name, requests)


def in_order(name: str, requests: Iterable[TraceRequest]) -> Trace:
    """Return a trace of these requests, in the order of their times, the first at 0."""
    ordered = sorted(requests, key=lambda request: request.at)
    start = ordered[0].at if ordered else 0.0
    if start:
        ordered = [replace(request, at=request.at - start) for request in ordered]
    return Trace(name, ordered)


class MooncakeRow(msgspec.Struct, omit_defaults=True):
    """A line of a Mooncake trace, with what other replayers add to it and leave out."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session_id: str = ""
    tenant: str = ""
    priority: int = 0
    ttft: float | None = None
    """Target, in seconds."""
    tpot: float | None = None


def write_mooncake(trace: Trace, path: Path) -> None:
    """Write a trace as Mooncake JSONL, times rounded to milliseconds."""
    encode = msgspec.json.encode
    with path.open("wb") as out:
        for request in trace.requests:
            row: dict[str, Any] = {
                "timestamp": round(1000 * request.at),
                "input_length": request.num_prompt_tokens,
                "output_length": request.num_output_tokens,
                "hash_ids": request.hash_ids,
            }
            extra = {
                "session_id": request.session,
                "tenant": request.tenant,
                "priority": request.priority,
                "ttft": request.ttft_target_seconds,
                "tpot": request.tpot_target_seconds,
            }
            row |= {name: value for name, value in extra.items() if value}
            out.write(encode(row) + b"\n")
