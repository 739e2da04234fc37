"""The engine: requests in, one step at a time, events out.

One thread calls everything here. A step that the runner cannot do ends the running requests with an
error and leaves the waiting ones; several such steps in a row mean that the device is lost, and raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import structlog

from headrace.engine.batch import BatchBuilder, BatchPlan
from headrace.engine.flight import Flight, Launcher
from headrace.engine.intake import Intake, ServedModel
from headrace.engine.kv_cache import KVCache
from headrace.engine.outcome import Outcome
from headrace.engine.ranking import deciding
from headrace.engine.runs import PlannedRun, planned_run, quiet_steps
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Family, Sequence, Status
from headrace.engine.step_account import StepAccount
from headrace.errors import EngineFailed, InvalidRequest, Unavailable
from headrace.interfaces import Clock, EvictionPolicy, RepeatingRunner, Runner, SchedulingPolicy
from headrace.types import (
    EngineSettings,
    EngineStats,
    GenerationRequest,
    StepFacts,
    TokenEvent,
)

MAX_FAILED_STEPS = 3
SCORE_ROW_BYTES = 64 << 20
"""Logits that scoring prompts may take per step."""


class Engine:
    """Continuous batching over one runner."""

    def __init__(
        self,
        runner: Runner,
        *,
        model: ServedModel,
        settings: EngineSettings,
        num_blocks: int,
        policy: SchedulingPolicy,
        clock: Clock,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.model = model
        self.max_model_len = min(settings.max_model_len, num_blocks * settings.block_size)
        self._account = StepAccount()
        self.step_time = self._account.step_time
        self._log = structlog.get_logger("headrace.engine")
        if self.max_model_len < settings.max_model_len:
            self._say_that_context_is_lowered(settings, num_blocks)
        self._runner = runner
        self._policy = policy
        self._eviction = eviction
        self._clock = clock
        self._max_queued_requests = settings.max_queued_requests
        self._families: dict[str, Family] = {}
        self._intake = Intake(
            model,
            max_model_len=self.max_model_len,
            block_size=settings.block_size,
            num_blocks=num_blocks,
        )
        self._kv_cache = KVCache(
            num_blocks,
            settings.block_size,
            model_revision=model.revision,
            prefix_caching=settings.prefix_caching,
            eviction=eviction,
        )
        self._scheduler = Scheduler(
            self._kv_cache,
            policy,
            settings,
            self.step_time,
            max_score_rows=max(16, SCORE_ROW_BYTES // (4 * model.vocab_size)),
        )
        batches = BatchBuilder(
            num_slots=self._scheduler.num_slots,
            num_groups=len(runner.kv_groups()),
            block_size=settings.block_size,
            max_model_len=self.max_model_len,
        )
        self._launcher = Launcher(runner, batches, clock)
        self._prepare: Callable[[], bool] | None = getattr(runner, "prepare", None)
        self._can_repeat: bool = getattr(runner, "can_repeat", False)
        self.run_times: tuple[float, ...] = ()
        """When each step of the last call of `step` was done, where it ran several as one."""
        self._landed_at = float("-inf")
        self._outcome = Outcome(self._scheduler, model.tokenizer, self._forget)
        self._is_closed = False
        self._failed_steps = 0
        self._mean_request_seconds = 0.0

    def _say_that_context_is_lowered(self, settings: EngineSettings, num_blocks: int) -> None:
        self._log.warning(
            "context lowered to what the KV pool holds",
            max_model_len=self.max_model_len,
            asked=settings.max_model_len,
            num_blocks=num_blocks,
            block_size=settings.block_size,
        )

    # --- requests ---------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it is never shed afterwards.

        Raises InvalidRequest where it can never be served, Unavailable where too many wait already.
        """
        self.check(request)
        self._check_queue(request.sampling.n)
        family = self._intake.family(request, self._clock.now())
        self._families[request.request_id] = family
        self._scheduler.add(family)

    def check(self, request: GenerationRequest) -> None:
        """Raise where the request could never be served, however empty the engine is."""
        if self._is_closed:
            raise Unavailable("the engine is stopping")
        if request.request_id in self._families:
            raise InvalidRequest(
                f"a request with the id {request.request_id!r} is already running; ids are unique",
                param="request_id",
            )
        num_slots, most_queued = self._scheduler.num_slots, self._max_queued_requests
        if request.sampling.n > num_slots + most_queued:
            raise InvalidRequest(
                f"n is {request.sampling.n}, but this engine runs {num_slots} choices at a time and "
                f"queues {most_queued} more",
                param="n",
            )
        self._intake.check(request)

    def has_room(self, num_choices: int) -> bool:
        """Whether the queue takes a request of so many choices now; each of n waits in its own right.

        Choices that find a free slot do not wait, so an idle engine takes them beside a full queue.
        """
        room = self._max_queued_requests + self._scheduler.num_free_slots
        return self._scheduler.num_waiting + num_choices <= room

    def abort(self, request_id: str) -> bool:
        """End a request at whatever stage, and free what it holds. False: no such request."""
        family = self._families.pop(request_id, None)
        if family is None:
            return False
        for sequence in family.sequences:
            if sequence.status is not Status.FINISHED:
                self._scheduler.remove(sequence)
        family.disband()
        return True

    def has_work(self) -> bool:
        """Whether a step is due: requests are there, or a step is in flight for some that left."""
        return bool(self._families) or self._launcher.ahead is not None

    def _check_queue(self, num_choices: int) -> None:
        if self.has_room(num_choices):
            return
        retry_after = self._predicted_wait_seconds()
        raise Unavailable(
            f"{self._scheduler.num_waiting} requests are waiting, at most "
            f"{self._max_queued_requests} may; try again in {retry_after:.0f} s",
            retry_after_seconds=retry_after,
        )

    def _predicted_wait_seconds(self) -> float:
        """Return how long the queue takes to move by one: 1 s to 60 s."""
        seconds = self._mean_request_seconds / max(1, self._scheduler.num_slots)
        return float(min(60, max(1, math.ceil(seconds))))

    def _forget(self, sequence: Sequence) -> None:
        family = sequence.family
        family.num_unfinished -= 1
        if family.num_unfinished == 0:
            self._families.pop(family.request.request_id, None)
            seconds = self._clock.now() - family.arrival_time
            self._mean_request_seconds += 0.1 * (seconds - self._mean_request_seconds)
            family.disband()

    # --- a step -----------------------------------------------------------------

    def step(self, until: float | None = None) -> list[TokenEvent]:
        """Run one step and return its news. Raises EngineFailed where the device is lost.

        Where the runner allows, the next step is planned and launched while this one runs.

        `until`: equal steps may be run as one, for as long as the clock is before that time when a
        step begins and nothing else can change. An event then has the tokens of all of them, and
        `run_times` says when each was there. Only runners that repeat steps by themselves do that.
        """
        self.run_times = ()
        flight = self._launcher.take_ahead()
        if flight is None:
            now = self._clock.now()
            plan = self._scheduler.schedule(now)
            if not plan.entries:
                return []
            if until is not None and self._can_repeat:
                run = planned_run(plan, self._scheduler)
                if run is not None:
                    return self._run(plan, run, until, now)
            try:
                flight = self._launcher.launch(plan, now)
            except Exception as error:
                return self._fail_running(error)
        failure = self._plan_ahead(flight)
        events = self._land(flight)
        if failure is not None:
            events += self._fail_running(failure)
        return events

    def prepare(self) -> bool:
        """Let the runner use a moment without work; False: it has nothing to do either."""
        if self._prepare is None:
            return False
        try:
            return self._prepare()
        except Exception as error:  # what only saves time costs nobody an answer
            self._log.error("the runner could not prepare, and is not asked again", exc_info=error)
            self._prepare = None
            return False

    def quiet_steps(self) -> tuple[int, int, int]:
        """Return the steps until the next end of a choice, and what the first of them computes.

        (steps, sequences, KV rows): so many steps of decodes alone pass at least, the one that ends a
        choice included, unless something is submitted or aborted. 0 steps: that cannot be said.
        """
        running = self._scheduler.running
        num_kv_rows = sum([sequence.num_kv_rows() + 1 for sequence in running])
        return quiet_steps(self._scheduler), len(running), num_kv_rows

    def _plan_ahead(self, flight: Flight) -> Exception | None:
        """Launch the step after `flight` where it can be known; return why the launch failed."""
        if not (flight.plan.is_flying and flight.plan.can_be_followed):
            return None
        now = self._clock.now()
        plan = self._scheduler.schedule_ahead(now, self._launcher.runs_beside)
        if plan is None:
            return None
        try:
            self._launcher.ahead = self._launcher.launch(plan, now, is_ahead=True)
        except Exception as error:
            return error
        return None

    def _land(self, flight: Flight) -> list[TokenEvent]:
        try:
            result = self._launcher.result(flight)
        except Exception as error:
            self._settle(flight)
            return self._fail_running(error)
        now = self._clock.now()
        events, copies = self._outcome.apply(flight.plan, result, now)
        if copies:
            self._runner.copy_blocks(copies)
        seconds = now - max(flight.launched_at, self._landed_at)
        self._landed_at = now
        plan = flight.plan
        self._failed_steps = 0
        self._account.count(plan.num_prefill_tokens, len(plan.entries), flight.num_kv_rows, seconds)
        self._tell_policy(flight.plan, events, now, seconds)
        return events

    def _run(
        self, plan: BatchPlan, planned: PlannedRun, until: float, start: float
    ) -> list[TokenEvent]:
        """Run a step, or several equal ones as one; the runner says how many began in time."""
        batch, num_steps = planned.batch, planned.num_steps
        if num_steps > 1:
            next_decision = self._scheduler.next_decision_at()
            until = until if next_decision is None else min(until, next_decision)
        run = cast(RepeatingRunner, self._runner).repeat(batch, num_steps, until)
        if num_steps > 1:
            self.run_times = tuple(run.times)
        events = self._outcome.apply_run(plan, run, start)
        num_kv_rows, num_sequences = batch.num_kv_rows, batch.num_sequences
        self._failed_steps = 0
        if plan.num_prefill_tokens:
            seconds = run.times[0] - start
            self._account.count(plan.num_prefill_tokens, num_sequences, num_kv_rows, seconds)
        else:
            self._account.count_decodes(num_sequences, num_kv_rows, start, run.times)
        if hasattr(deciding(self._policy), "observe"):
            ending = [event for event in events if event.finish_reason is not None]
            before = start
            for time in run.times:
                said = ending if time == run.times[-1] else []
                self._tell_policy(plan, said, time, time - before)
                before = time
        self._landed_at = run.times[-1]
        return events

    def _settle(self, flight: Flight) -> None:
        """Give up a step: its sequences count no token of it any more."""
        if flight.plan.is_flying:
            for entry in flight.plan.entries:
                self._outcome.land(entry)

    def _tell_policy(
        self, plan: BatchPlan, events: list[TokenEvent], now: float, seconds: float
    ) -> None:
        if not hasattr(deciding(self._policy), "observe"):
            return
        tokens: dict[str, int] = {}
        for entry in plan.entries:
            name = entry.sequence.request.request_id
            tokens[name] = tokens.get(name, 0) + entry.num_tokens
        ended = (event.request_id for event in events if event.finish_reason is not None)
        finished = tuple(name for name in dict.fromkeys(ended) if name not in self._families)
        observe = getattr(self._policy, "observe")  # noqa: B009
        observe(StepFacts(now=now, step_seconds=seconds, tokens=tokens, finished=finished))

    def _fail_running(self, error: Exception) -> list[TokenEvent]:
        """End what was running; nothing of the failed step was published, so the cache stays right."""
        flight = self._launcher.take_ahead()
        if flight is not None:
            self._launcher.wait_out(flight)
            self._settle(flight)
        self._failed_steps += 1
        self._log.error(
            "step failed",
            running=len(self._scheduler.running),
            in_a_row=self._failed_steps,
            exc_info=error,
        )
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailed(
                f"{self._failed_steps} steps in a row failed; the last with {type(error).__name__}"
            ) from error
        info = EngineFailed(
            f"the engine failed while serving this request ({type(error).__name__}); "
            "the log of the server has the details"
        ).info()
        now = self._clock.now()
        events: list[TokenEvent] = []
        for sequence in list(self._scheduler.running):
            dependent = [sequence]
            if sequence.index == 0:
                dependent += sequence.family.pending()
            events += [self._outcome.fail(s, info, now, rows_valid=True) for s in dependent]
        return events

    # --- the rest ---------------------------------------------------------------

    def occupancy(self) -> tuple[int, int, int]:
        """Return sequences waiting, sequences running and blocks in use: what `stats` says, for less."""
        pool = self._kv_cache.pool
        scheduler = self._scheduler
        return scheduler.num_waiting, len(scheduler.running), pool.num_blocks - pool.num_free

    def stats(self) -> EngineStats:
        pool = self._kv_cache.pool
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            preemptions_total=self._scheduler.preemptions_total,
            prefix_query_tokens_total=self._kv_cache.query_tokens_total,
            prefix_hit_tokens_total=self._kv_cache.hit_tokens_total,
            prompt_tokens_total=self._outcome.prompt_tokens_total,
            generation_tokens_total=self._outcome.generation_tokens_total,
            steps_total=self._account.steps_total,
            step_seconds_total=self._account.seconds_total,
            prefill_step_seconds_total=self._account.prefill_seconds_total,
            step_time_coefficients=self.step_time.coefficients,
            step_time_error=self.step_time.relative_error,
            **_policy_counts("policy", self._policy),
            **_policy_counts("eviction", self._eviction),
        )

    def close(self) -> None:
        """Drop every request and free the device. A second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in list(self._families):
            self.abort(request_id)
        flight = self._launcher.take_ahead()
        if flight is not None:
            self._launcher.wait_out(flight)
        self._runner.close()


def _policy_counts(prefix: str, policy: object) -> dict[str, Any]:
    """Return what a guard counts, as fields of EngineStats; a policy without one counts nothing."""
    names = ("failures_total", "calls_total", "seconds_total")
    return {f"{prefix}_{name}": getattr(policy, name, 0) for name in names}
