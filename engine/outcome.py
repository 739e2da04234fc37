"""What a step's result means for its sequences: tokens, forks, ends, and the events that say so.

Nothing a step computed counts before it passes through here: only now are tokens counted as computed,
full blocks published and stops matched.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.engine.batch import BatchPlan, PlannedSequence
from headrace.engine.output import SequenceOutput, TokenRow, token_logprobs
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.errors import EngineFailed, ErrorInfo
from headrace.text.tokenizer import Tokenizer
from headrace.types import RequestTimings, StepResult, TenantService, TokenEvent, Usage

_MAX_TENANTS = 4096


class Outcome:
    """Applies results to sequences. `on_end` is told each choice that ended."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, on_end: Callable[[Sequence], None]
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = scheduler.kv_cache
        self._tokenizer = tokenizer
        self._on_end = on_end
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0

    def apply(
        self, plan: BatchPlan, result: StepResult, now: float
    ) -> tuple[list[TokenEvent], list[tuple[int, int]]]:
        """Return the events of a step and the blocks to copy before the next one."""
        rows = _Rows(result)
        events: list[TokenEvent] = []
        copies: list[tuple[int, int]] = []
        first_row = 0
        for entry in plan.entries:
            num_rows = entry.num_score_rows + len(entry.drawing)
            if rows.any_failed(first_row, first_row + num_rows):
                events += self._fail_family_rows(entry, now)
            else:
                self._advance(entry)
                self._take_scores(entry, rows, first_row)
                first_draw = first_row + entry.num_score_rows
                self._draw(entry, rows, first_draw, (events, copies), now)
            first_row += num_rows
        return events, copies

    def fail(
        self, sequence: Sequence, error: ErrorInfo, now: float, *, rows_valid: bool
    ) -> TokenEvent:
        """End one choice with an error. `rows_valid`: whether its published blocks can be trusted."""
        event = sequence.output.finish("error", error=error)
        assert event is not None, "a choice that has ended is in no step"
        return self._end(sequence, event, now, rows_valid=rows_valid)

    # --- one entry --------------------------------------------------------------

    def _advance(self, entry: PlannedSequence) -> None:
        sequence = entry.sequence
        sequence.num_computed_tokens += entry.num_tokens
        self._kv_cache.publish(sequence)

    def _take_scores(self, entry: PlannedSequence, rows: _Rows, first_row: int) -> None:
        family = entry.sequence.family
        num_logprobs = family.request.sampling.prompt_logprobs or 0
        for row in range(first_row, first_row + entry.num_score_rows):
            scored = token_logprobs(self._tokenizer, rows.token_row(row), num_logprobs)
            family.prompt_logprobs.append(scored)

    def _draw(
        self,
        entry: PlannedSequence,
        rows: _Rows,
        first_row: int,
        out: tuple[list[TokenEvent], list[tuple[int, int]]],
        now: float,
    ) -> None:
        """Give each drawing choice its token; further choices fork before the first can end."""
        events, copies = out
        leader = entry.sequence
        forks = entry.drawing[1:]
        for offset, fork in enumerate(forks, start=1):
            fork.token_ids = list(leader.request.prompt_token_ids)
            event = self._take_token(fork, rows.token_row(first_row + offset), now)
            if fork.output.finish_reason is None:
                copies += self._scheduler.place_fork(leader, fork)
            else:
                fork.num_cached_tokens = leader.num_cached_tokens
                fork.start_time = leader.start_time
            self._say(fork, event, events, now)
        if entry.drawing:
            event = self._take_token(leader, rows.token_row(first_row), now)
            self._say(leader, event, events, now)

    def _take_token(self, sequence: Sequence, row: TokenRow, now: float) -> TokenEvent | None:
        event = sequence.output.append((row,))
        service = self._service(sequence.request.tenant)
        service.last_active = now
        if sequence.first_token_time is None and sequence.index == 0:
            self.prompt_tokens_total += sequence.num_tokens
            service.input_tokens += sequence.num_tokens
        if sequence.max_tokens == 0:
            return event
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        sequence.last_token_time = now
        sequence.token_ids.append(row.token_id)
        sequence.sampling.token_drawn(row.token_id)
        self.generation_tokens_total += 1
        service.output_tokens += 1
        return event

    def _say(
        self, sequence: Sequence, event: TokenEvent | None, events: list[TokenEvent], now: float
    ) -> None:
        if event is None:
            return
        if sequence.output.finish_reason is not None:
            event = self._end(sequence, event, now, rows_valid=True)
        events.append(_with_prompt(sequence, event))

    # --- ends -------------------------------------------------------------------

    def _end(
        self, sequence: Sequence, event: TokenEvent, now: float, *, rows_valid: bool
    ) -> TokenEvent:
        self._scheduler.remove(sequence, are_rows_valid=rows_valid)
        self._on_end(sequence)
        return msgspec.structs.replace(
            event, usage=_usage(sequence, sequence.output), timings=_timings(sequence, now)
        )

    def _fail_family_rows(self, entry: PlannedSequence, now: float) -> list[TokenEvent]:
        """End whoever depends on rows that are no numbers, and make their blocks unfindable."""
        error = EngineFailed(
            "the model's logits for this request held NaN, so it cannot go on; other requests are "
            "not affected"
        ).info()
        sequence = entry.sequence
        dependent = [sequence]
        if sequence.index == 0:
            dependent += sequence.family.pending()
        return [self.fail(choice, error, now, rows_valid=False) for choice in dependent]

    def _service(self, tenant: str) -> TenantService:
        tenants = self._scheduler.tenants
        service = tenants.get(tenant)
        if service is None:
            if len(tenants) >= _MAX_TENANTS:
                del tenants[min(tenants, key=lambda name: tenants[name].last_active)]
            service = tenants[tenant] = TenantService()
        return service


class _Rows:
    """A StepResult as plain Python values, converted once."""

    __slots__ = ("_failed", "_logprobs", "_result", "_token_ids")

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._token_ids: list[int] = result.token_ids.tolist()
        self._logprobs = None if result.logprobs is None else result.logprobs.tolist()
        self._failed = result.failed.tolist() if result.failed.any() else None

    def any_failed(self, start: int, end: int) -> bool:
        return self._failed is not None and any(self._failed[start:end])

    def token_row(self, row: int) -> TokenRow:
        token_id = self._token_ids[row]
        if self._logprobs is None:
            return TokenRow(token_id)
        top_ids, top_logprobs = self._result.top_token_ids, self._result.top_logprobs
        top: tuple[tuple[int, float], ...] = ()
        if top_ids is not None and top_logprobs is not None:
            top = tuple(zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True))
        return TokenRow(token_id, self._logprobs[row], top)


def _with_prompt(sequence: Sequence, event: TokenEvent) -> TokenEvent:
    """Put the prompt's log probabilities into the choice's first event where they were asked for."""
    if sequence.is_prompt_reported or sequence.request.sampling.prompt_logprobs is None:
        return event
    sequence.is_prompt_reported = True
    return msgspec.structs.replace(event, prompt_logprobs=sequence.family.prompt_logprobs)


def _usage(sequence: Sequence, output: SequenceOutput) -> Usage:
    return Usage(
        prompt_tokens=len(sequence.request.prompt_token_ids),
        completion_tokens=output.num_tokens,
        cached_tokens=sequence.num_cached_tokens or 0,
    )


def _timings(sequence: Sequence, now: float) -> RequestTimings:
    """Return the choice's times. A resumed choice keeps those of its first start and first token."""
    arrival = sequence.family.arrival_time
    start = now if sequence.start_time is None else sequence.start_time
    first = sequence.first_token_time
    return RequestTimings(
        queue_seconds=start - arrival,
        prefill_seconds=(now if first is None else first) - start,
        decode_seconds=0.0 if first is None else now - first,
        ttft_seconds=None if first is None else first - arrival,
        num_preemptions=sequence.num_preemptions,
    )
