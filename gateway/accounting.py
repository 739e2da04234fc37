"""The facts of one request, told exactly once when it is over: to the log, the metrics, the observers.

Times are read where news reaches the gateway, so they include what the client cannot see apart:
queue, prefill and the way back from the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from headrace.gateway.state import GatewayState
from headrace.gateway.trace_context import TraceContext
from headrace.gateway.tracing import SpanFacts
from headrace.types import RequestSummary, RequestTimings, TokenEvent

_logger = structlog.get_logger("headrace.gateway")


@dataclass(slots=True)
class _ChoiceFacts:
    """One choice of one prompt."""

    num_tokens: int = 0
    last_time: float = 0.0
    finish_reason: str | None = None


@dataclass(slots=True)
class _PromptFacts:
    """One prompt: its own tokens, and what the prefix cache gave its first computation."""

    num_tokens: int
    cached_tokens: int | None = None


class RelayedCounts(Protocol):
    """The tokens another server says it counted."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


@dataclass(slots=True)
class RequestRecord:
    """Collects while the request runs. `finish` may be called any number of times."""

    state: GatewayState
    endpoint: str
    request_id: str
    started_at: float
    model: str = ""
    status: int = 200
    error_code: str | None = None
    first_token_at: float | None = None
    trace: TraceContext | None = None
    _prompts: list[_PromptFacts] = field(default_factory=list)
    _choices: dict[tuple[int, int], _ChoiceFacts] = field(default_factory=dict)
    _timings: list[RequestTimings] = field(default_factory=list)
    _finished: bool = False

    def begin(self, model: str, prompt_lengths: Sequence[int], num_choices: int) -> None:
        """The request is valid and goes to a replica."""
        self.model = model
        self._prompts = [_PromptFacts(length) for length in prompt_lengths]
        for place in itertools.product(range(len(prompt_lengths)), range(num_choices)):
            self._choices[place] = _ChoiceFacts()
        self.state.metrics.request_started(model, self.endpoint)

    def restart(self, prompt_index: int) -> None:
        """A prompt begins anew on another replica: what it said counts for nothing."""
        self._prompts[prompt_index].cached_tokens = None
        for place in self._choices:
            if place[0] == prompt_index:
                self._choices[place] = _ChoiceFacts()

    def relayed(
        self, usage: RelayedCounts | None, finish_reasons: Sequence[str], *, otherwise: int = 0
    ) -> None:
        """Another server has answered: note what it counted, of all choices together, and how they ended.

        Where it did not count, or was not heard to the end, `otherwise` is about what it produced.
        """
        now = self.state.clock.now()
        for choice, reason in zip(self._choices.values(), finish_reasons, strict=False):
            choice.finish_reason = reason
        num_tokens = otherwise if usage is None else usage.completion_tokens
        each, rest = divmod(num_tokens, len(self._choices))
        for index, choice in enumerate(self._choices.values()):
            choice.num_tokens, choice.last_time = each + (index < rest), now
        if usage is not None:
            self._prompts[0].num_tokens = usage.prompt_tokens
            self._prompts[0].cached_tokens = usage.cached_tokens

    def take(self, prompt_index: int, events: Sequence[TokenEvent]) -> None:
        """Note news."""
        now = self.state.clock.now()
        for event in events:
            self._take(prompt_index, event, now)

    def _take(self, prompt_index: int, event: TokenEvent, now: float) -> None:
        choice = self._choices[prompt_index, event.index]
        if event.token_ids:
            if self.first_token_at is None:
                self.first_token_at = now
            if choice.num_tokens:
                self.state.metrics.inter_token(self.model, now - choice.last_time)
            choice.num_tokens += len(event.token_ids)
            choice.last_time = now
        if event.finish_reason is not None:
            choice.finish_reason = event.finish_reason
        if event.timings is not None:
            self._timings.append(event.timings)
        if event.usage is not None:
            choice.num_tokens = event.usage.completion_tokens
            prompt = self._prompts[prompt_index]
            cached = event.usage.cached_tokens
            known = prompt.cached_tokens
            prompt.cached_tokens = cached if known is None else min(known, cached)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, whatever n is."""
        return sum(prompt.num_tokens for prompt in self._prompts)

    @property
    def cached_tokens(self) -> int:
        """What the prefix cache gave; with n choices, the one that computed the prompt counts."""
        return sum(prompt.cached_tokens or 0 for prompt in self._prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    def choice_tokens(self) -> list[int]:
        """Return what each choice produced."""
        return [choice.num_tokens for choice in self._choices.values()]

    def tpot_seconds(self) -> float | None:
        """Seconds per token after the first, of the choice with the most tokens."""
        if self.first_token_at is None:
            return None
        longest = max(self._choices.values(), key=lambda choice: choice.num_tokens)
        if longest.num_tokens < 2:
            return None
        return (longest.last_time - self.first_token_at) / (longest.num_tokens - 1)

    def summary(self) -> RequestSummary:
        now = self.state.clock.now()
        ttft = None if self.first_token_at is None else self.first_token_at - self.started_at
        unfinished = "abort" if self.status == 499 else "error"
        return RequestSummary(
            request_id=self.request_id,
            model=self.model,
            endpoint=self.endpoint,
            status=self.status,
            finish_reasons=tuple(
                choice.finish_reason or unfinished for choice in self._choices.values()
            ),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            ttft_seconds=ttft,
            tpot_seconds=self.tpot_seconds(),
            duration_seconds=now - self.started_at,
        )

    def finish(self) -> None:
        """Tell everyone, once."""
        if self._finished:
            return
        self._finished = True
        summary = self.summary()
        self.state.metrics.request_finished(summary, self._timings)
        self.state.observers.request_finished(summary)
        self._trace(summary)
        _logger.info(
            "request finished",
            request_id=summary.request_id,
            endpoint=summary.endpoint,
            model=summary.model,
            status=summary.status,
            error=self.error_code,
            reasons=list(summary.finish_reasons),
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
            ttft_seconds=_rounded(summary.ttft_seconds),
            tpot_seconds=_rounded(summary.tpot_seconds),
            duration_seconds=_rounded(summary.duration_seconds),
        )

    def _trace(self, summary: RequestSummary) -> None:
        tracing, trace = self.state.tracing, self.trace
        if tracing is None or trace is None or not trace.is_sampled:
            return
        replica = structlog.contextvars.get_contextvars().get("replica", "")
        tracing.request_finished(SpanFacts(trace, summary, self._timings, self.error_code, replica))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
