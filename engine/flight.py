"""Steps on the device: launching them, and the one that may be in flight while the next is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from headrace.engine.batch import BatchBuilder, BatchPlan
from headrace.interfaces import BesideRunner, Clock, Runner, StepHandle
from headrace.types import StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and whose result has not been taken."""

    plan: BatchPlan
    handle: StepHandle
    launched_at: float
    num_kv_rows: int
    """Rows of keys and values that its attention reads."""


class Launcher:
    """Turns plans into steps on a runner, at most one of them ahead."""

    def __init__(self, runner: Runner, batches: BatchBuilder, clock: Clock) -> None:
        self._runner = runner
        self._batches = batches
        self._clock = clock
        self._runs_ahead: bool = getattr(runner, "runs_ahead", False)
        self.runs_beside: Callable[[int, int], bool] | None = getattr(runner, "runs_beside", None)
        self.ahead: Flight | None = None
        """The step launched before the result of the one before it was in."""

    def launch(self, plan: BatchPlan, now: float, *, is_ahead: bool = False) -> Flight:
        """Launch a step. Raises what the runner raises; then no sequence counts it as in flight.

        `is_ahead`: before the result of the one in flight was taken.
        """
        batch = self._batches.build(plan)
        num_kv_rows = int(batch.kv_lens[0].sum())
        is_beside = (
            self.runs_beside is not None
            and plan.can_be_followed
            and self.runs_beside(len(batch.token_ids), num_kv_rows)
        )
        if is_beside:
            handle = cast(BesideRunner, self._runner).execute_beside(batch)
        else:
            handle = self._runner.execute(batch)
            handle.sample()
        if is_ahead or is_beside or self._runs_ahead:
            plan.take_off()
        return Flight(plan, handle, now, num_kv_rows)

    def take_ahead(self) -> Flight | None:
        """Return the step launched ahead, which is the next to give its result."""
        flight, self.ahead = self.ahead, None
        return flight

    def result(self, flight: Flight) -> StepResult:
        """Wait for a step. Raises what the runner raises."""
        return flight.handle.result()

    def wait_out(self, flight: Flight) -> None:
        """Wait for a step whose result nobody wants, a failure included."""
        with contextlib.suppress(Exception):
            flight.handle.result()
