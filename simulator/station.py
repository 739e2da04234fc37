"""A replica in virtual time: an engine with a clock of its own that is never far ahead of the others'.

An engine runs until something could reach it from outside. What it says is news with a time; the
cluster takes news in the order of their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.engine import Engine
from headrace.interfaces import Clock
from headrace.step_time import StepTime
from headrace.testing.clock import FakeClock
from headrace.types import EngineStats, GenerationRequest, ModelCard, Progress

_ROUNDING = 1.0 - 1e-9


@dataclass(slots=True)
class News:
    """What became of a request: its first token, its end, or both at once."""

    request_id: str
    at: float
    is_first: bool
    is_end: bool
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Station:
    """One replica. Implements headrace.engine.client.EngineClient as far as routing looks."""

    def __init__(
        self,
        number: int,
        build: Callable[[Clock], Engine],
        card: ModelCard,
        step_time: StepTime,
        *,
        is_alone: bool,
        is_step_by_step: bool = False,
    ) -> None:
        """`is_alone`: no other station's news has to be taken in order with this one's."""
        self.number = number
        self.id = f"replica-{number}"
        self.card = card
        self.state = "ready"
        self.restarts_total = 0
        self.failure = None
        self.progress = Progress(stage="ready", fraction=1.0)
        self._clock = FakeClock()
        self._build = build
        self._engine: Engine | None = None
        self._step_time = step_time
        self._is_step_by_step = is_step_by_step
        self._looks_at_once = is_alone or is_step_by_step
        self._started: set[str] = set()

    @property
    def engine(self) -> Engine:
        """The engine, built when the first request comes: of a thousand replicas not all may get one."""
        if self._engine is None:
            self._engine = self._build(self._clock)
        return self._engine

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    @property
    def now(self) -> float:
        return self._clock.now()

    @property
    def has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work()

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Take a request at a time to which the station has been run. Raises what the engine raises."""
        if self._clock.now() < now:
            self._clock.set(now)
        self.engine.submit(request)

    def step_launched(self, now: float) -> list[News]:
        """Run the step that a request which comes at `now` finds launched behind the one that runs.

        That is so for small decodes which are computed beside the engine's own work.
        """
        runs_beside = getattr(self._step_time, "runs_beside", None)
        if runs_beside is None or self._clock.now() <= now:
            return []
        num_steps, num_sequences, num_kv_rows = self.engine.quiet_steps()
        if not num_steps or not runs_beside(num_sequences, num_kv_rows):
            return []
        return self.run(math.nextafter(self._clock.now(), math.inf))

    def run(self, until: float) -> list[News]:
        """Step until there is news, or until the clock has reached a time; return the news.

        A step that began before that time is run to its end.
        """
        engine, clock = self.engine, self._clock
        limit = None if self._is_step_by_step else until
        while clock.now() < until and engine.has_work():
            events = engine.step(limit)
            if not events:
                continue
            news = []
            at, started = clock.now(), self._started
            for event in events:
                is_end = event.finish_reason is not None
                is_first = event.request_id not in started
                if is_first and not is_end:
                    started.add(event.request_id)
                if is_end:
                    started.discard(event.request_id)
                    assert event.usage is not None and event.timings is not None
                    news.append(
                        News(
                            event.request_id,
                            at,
                            is_first,
                            is_end,
                            event.usage.cached_tokens,
                            event.timings.num_preemptions,
                        )
                    )
                elif is_first:
                    news.append(News(event.request_id, at, is_first, is_end))
            if news:
                return news
        return []

    def next_news_at(self) -> float:
        """Return a time before which there will be no news unless something comes from outside."""
        now = self._clock.now()
        if self._engine is None or self._looks_at_once:
            return now
        num_steps, num_sequences, num_kv_rows = self._engine.quiet_steps()
        if not num_steps:
            return now
        each: float = self._step_time.seconds(0, num_sequences, num_kv_rows)
        return now + num_steps * each * _ROUNDING
