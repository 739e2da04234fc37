"""What a step's result means for its sequences: tokens, forks, ends, and the events that say so.

Nothing a step computed counts before it passes through here: only now are tokens counted as computed,
full blocks published and stops matched.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec

from headrace.engine.batch import BatchPlan, PlannedSequence
from headrace.engine.output import SequenceOutput, TokenRow, token_logprobs
from headrace.engine.runs import fill_blocks
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence, Status
from headrace.errors import EngineFailed, ErrorInfo
from headrace.text.tokenizer import Tokenizer
from headrace.types import RequestTimings, RunResult, StepResult, TokenEvent, Usage


class Outcome:
    """Applies results to sequences. `on_end` is told each choice that ended."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer | None, on_end: Callable[[Sequence], None]
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = scheduler.kv_cache
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._drawn: dict[str, int] = {}
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0

    def apply(
        self, plan: BatchPlan, result: StepResult, now: float
    ) -> tuple[list[TokenEvent], list[tuple[int, int]]]:
        """Return the events of a step and the blocks to copy before the next one.

        What a step launched ahead computed for a choice that ended meanwhile is dropped.
        """
        return self._apply(plan, _Rows(result.token_ids.tolist(), result), now)

    def _apply(
        self, plan: BatchPlan, rows: _Rows, now: float
    ) -> tuple[list[TokenEvent], list[tuple[int, int]]]:
        events: list[TokenEvent] = []
        copies: list[tuple[int, int]] = []
        first_row = 0
        for entry in plan.entries:
            num_rows = entry.num_score_rows + len(entry.drawing)
            if plan.is_flying and self.land(entry):
                pass
            elif rows.any_failed(first_row, first_row + num_rows):
                events += self._fail_family_rows(entry, now)
            else:
                self._advance(entry)
                if entry.num_score_rows:
                    self._take_scores(entry, rows, first_row)
                if entry.drawing:
                    first_draw = first_row + entry.num_score_rows
                    self._draw(entry, rows, first_draw, (events, copies), now)
            first_row += num_rows
        self._account(now)
        return events, copies

    def apply_run(self, plan: BatchPlan, run: RunResult, start: float) -> list[TokenEvent]:
        """Return the events of a run, one per choice that has news; more than one step are all decodes."""
        now = run.times[-1]
        if len(run.times) == 1:
            return self._apply(plan, _Rows([drawn[0] for drawn in run.token_ids]), now)[0]
        for entry, token_ids in zip(plan.entries, run.token_ids, strict=True):
            entry.sequence.token_ids.extend(token_ids)
        fill_blocks(plan, self._kv_cache, [start, *run.times[:-1]])
        events: list[TokenEvent] = []
        for entry, token_ids in zip(plan.entries, run.token_ids, strict=True):
            sequence = entry.sequence
            sequence.last_token_time = now
            self._count(sequence, len(token_ids))
            self._say(sequence, sequence.output.append_run(token_ids), events, now)
        self._account(now)
        return events

    def land(self, entry: PlannedSequence) -> bool:
        """Take an entry's tokens out of the air; return whether its choice has ended meanwhile."""
        sequence = entry.sequence
        sequence.land(entry.num_tokens)
        if sequence.status is not Status.FINISHED:
            return False
        if not sequence.num_flying_tokens:
            self._scheduler.release(sequence)
        return True

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
        assert self._tokenizer is not None, "log probabilities spell their tokens"
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
        for row, fork in enumerate(entry.drawing[1:], start=first_row + 1):
            fork.token_ids = array("I", leader.request.prompt_token_ids)
            event = self._take_token(fork, rows, row, now)
            if fork.output.finish_reason is None:
                copies += self._scheduler.place_fork(leader, fork)
            else:
                fork.num_cached_tokens = leader.num_cached_tokens
                fork.start_time = leader.start_time
            self._say(fork, event, events, now)
        self._say(leader, self._take_token(leader, rows, first_row, now), events, now)

    def _take_token(
        self, sequence: Sequence, rows: _Rows, row: int, now: float
    ) -> TokenEvent | None:
        token_id = rows.token_ids[row]
        if rows.has_logprobs:
            event = sequence.output.append((rows.token_row(row),))
        else:
            event = sequence.output.append_token(token_id)
        if sequence.first_token_time is None:
            self._note_prompt(sequence)
            if sequence.max_tokens == 0:
                return event
            sequence.first_token_time = now
        sequence.last_token_time = now
        sequence.token_ids.append(token_id)
        sequence.sampling.token_drawn(token_id)
        self._count(sequence, 1)
        return event

    def _note_prompt(self, sequence: Sequence) -> None:
        """Count the prompt, once for all choices, before the first token is added to it."""
        if sequence.index == 0:
            self.prompt_tokens_total += sequence.num_tokens
        self._count(sequence, 0)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        drawn, tenant = self._drawn, sequence.family.request.tenant
        drawn[tenant] = drawn.get(tenant, 0) + num_tokens

    def _account(self, now: float) -> None:
        """Book what the tenants were given since the last call."""
        for tenant, num_tokens in self._drawn.items():
            self._scheduler.book(tenant, now, output_tokens=num_tokens)
            self.generation_tokens_total += num_tokens
        self._drawn.clear()

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


class _Rows:
    """A StepResult as plain Python values, converted once; of virtual time, drawn tokens alone."""

    __slots__ = ("_failed", "_logprobs", "_result", "has_logprobs", "token_ids")

    def __init__(self, token_ids: list[int], result: StepResult | None = None) -> None:
        self._result = result
        self.token_ids = token_ids
        self._logprobs = self._failed = None
        if result is not None:
            self._logprobs = None if result.logprobs is None else result.logprobs.tolist()
            self._failed = result.failed.tolist() if result.failed.any() else None
        self.has_logprobs = self._logprobs is not None

    def any_failed(self, start: int, end: int) -> bool:
        return self._failed is not None and any(self._failed[start:end])

    def token_row(self, row: int) -> TokenRow:
        token_id = self.token_ids[row]
        if self._logprobs is None or self._result is None:
            return TokenRow(token_id)
        top_ids, top_logprobs = self._result.top_token_ids, self._result.top_logprobs
        top: tuple[tuple[int, float], ...] = ()
        if top_ids is not None and top_logprobs is not None:
            top = tuple(zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True))
        return TokenRow(token_id, self._logprobs[row], top)


def _with_prompt(sequence: Sequence, event: TokenEvent) -> TokenEvent:
    """Put the prompt's log probabilities into the request's first event where they were asked for."""
    family = sequence.family
    if family.is_prompt_reported or family.request.sampling.prompt_logprobs is None:
        return event
    family.is_prompt_reported = True
    return msgspec.structs.replace(event, prompt_logprobs=family.prompt_logprobs)


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
