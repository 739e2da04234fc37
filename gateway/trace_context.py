"""W3C trace context: what a request belongs to, as its caller says and as replicas are told.

Where spans are recorded the gateway is a link of the trace, with a span id of its own. Where they are
not, a caller's trace passes through unchanged and no trace is begun.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from starlette.types import Scope

_SCOPE_KEY = "headrace.trace"
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(rb"[\x20-\x7e\t]{1,512}")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One request's place in a trace; ids are lower-case hexadecimal."""

    trace_id: str
    """32 digits."""
    span_id: str
    """16 digits: the gateway's span, or the caller's where the gateway records none."""
    parent_span_id: str = ""
    """The caller's span; "" where the trace begins here."""
    is_sampled: bool = False
    state: str = ""
    """The caller's `tracestate`, passed on as it came."""

    @property
    def traceparent(self) -> str:
        """The header that says so, for replicas and for the answer."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def trace_of(scope: Scope) -> TraceContext | None:
    """Return the trace a request belongs to; None where there is none."""
    trace: TraceContext | None = scope.get(_SCOPE_KEY)
    return trace


def set_trace(scope: Scope, trace: TraceContext | None) -> None:
    """Note the trace for everything that handles the request from here on."""
    scope[_SCOPE_KEY] = trace


def received_trace(scope: Scope) -> TraceContext | None:
    """Return what the caller's headers say; None where they say nothing or nothing valid."""
    parents, states = [], []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    match = _TRACEPARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16):
        return None
    if not int(span_id, 16):
        return None
    state = b",".join(states)
    return TraceContext(
        trace_id=trace_id.decode(),
        span_id=span_id.decode(),
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=state.decode() if _TRACESTATE.fullmatch(state) else "",
    )


def own_trace(received: TraceContext | None, sample_ratio: float) -> TraceContext:
    """Return the context of a span of our own, in the caller's trace or at the start of a new one.

    Whether it is recorded is the caller's decision; where there is none, the ratio's.
    """
    span_id = f"{random.getrandbits(64) or 1:016x}"
    if received is None:
        return TraceContext(
            trace_id=f"{random.getrandbits(128) or 1:032x}",
            span_id=span_id,
            is_sampled=random.random() < sample_ratio,
        )
    return TraceContext(
        trace_id=received.trace_id,
        span_id=span_id,
        parent_span_id=received.span_id,
        is_sampled=received.is_sampled,
        state=received.state,
    )
