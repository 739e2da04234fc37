"""The event loop of a simulation: arrivals, admission, routing, engines and their news in order of time.

Engines run ahead of the others only as far as nothing can reach them from outside, so that a run of a
thousand equal steps costs one call, and the outcome is the same as step by step.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from headrace.errors import RequestError
from headrace.gateway.ledger import Hold
from headrace.gateway.router import Router
from headrace.simulator.door import Caller, Door
from headrace.simulator.outcomes import Moment, Outcomes
from headrace.simulator.prompts import PromptMaker
from headrace.simulator.station import News, Station
from headrace.simulator.trace import Trace, TraceRequest
from headrace.types import GenerationRequest, RoutingRequest, SamplingParams

_MOMENTS = 400
_NEWS, _ASK = 0, 1
_NEVER = float("inf")


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles of garbage less often, and not in what was there before.

    Most of what a simulation makes has none.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@dataclass(slots=True)
class _Inside:
    """A request in an engine."""

    caller: Caller
    hold: Hold
    station: Station


class Cluster:
    """Replicas behind one gateway, serving one trace."""

    def __init__(
        self,
        trace: Trace,
        stations: Sequence[Station],
        *,
        router: Router,
        door: Door,
        prompts: PromptMaker,
        model: str,
        request_seconds: float = 0.0,
    ) -> None:
        """`request_seconds`: between a request's arrival and its place in an engine's queue."""
        self.outcomes = Outcomes(trace)
        self._trace = trace
        self._stations: Mapping[str, Station] = {station.id: station for station in stations}
        self._router = router
        self._door = door
        self._prompts = prompts
        self._model = model
        self._request_seconds = request_seconds
        self._facts: list[tuple[float, int, int, Any]] = []
        """What happened and is to be taken in: (time, kind, number of the station or row, what)."""
        self._looks: list[tuple[float, int, Station]] = []
        self._inside: dict[str, _Inside] = {}
        self._looked_at: dict[str, float] = {}
        self._fill: dict[str, tuple[int, int, int]] = {}
        self._sums = [0, 0, 0]
        self._num_blocks = sum(station.card.num_blocks for station in stations)
        self._moment_gap = trace.seconds / _MOMENTS
        self._next_moment = 0.0

    def run(self) -> Outcomes:
        """Serve the whole trace and return what became of it."""
        with _rare_collections():
            for row, request in enumerate(self._trace.requests):
                at = request.at + self._request_seconds
                self._run_until(at)
                self._arrive(row, request, at)
            self._run_until(_NEVER)
        stats = [station.stats for station in self._stations.values()]
        self.outcomes.steps_total = sum(each.steps_total for each in stats)
        self.outcomes.step_seconds_total = sum(each.step_seconds_total for each in stats)
        self.outcomes.prefill_step_seconds_total = sum(
            each.prefill_step_seconds_total for each in stats
        )
        return self.outcomes

    # --- time -------------------------------------------------------------------

    def ask_at(self, at: float, caller: Caller) -> None:
        """Note that a caller at the door asks again at a time."""
        heapq.heappush(self._facts, (at, _ASK, caller.row, caller))

    def _run_until(self, time: float) -> None:
        """Let everything happen that happens before `time`; news and questions at it too.

        Steps that begin at `time` wait for whoever comes then. Equal times go by kind and number, so
        that the order depends on nothing else.
        """
        facts, looks = self._facts, self._looks
        while True:
            fact_at = facts[0][0] if facts else _NEVER
            if looks and looks[0][0] < time and looks[0][0] < fact_at:
                at, _, station = heapq.heappop(looks)
                self._look(station, at, time)
            elif facts and fact_at <= time:
                at, kind, _, what = heapq.heappop(facts)
                if kind == _NEWS:
                    self._take_news(*what)
                elif what.asks_at == at:
                    self._ask(what, at)
            else:
                return

    def _look(self, station: Station, at: float, time: float) -> None:
        """Run a station whose next news may be due, and note when to look again."""
        if self._looked_at.get(station.id) != at:
            return
        del self._looked_at[station.id]
        until = time
        if self._door.num_waiting:  # any news may let somebody in who is sent here
            others = self._looks[0][0] if self._looks else _NEVER
            until = min(until, others, self._facts[0][0] if self._facts else _NEVER)
        self._follow(station, station.run(max(until, math.nextafter(station.now, _NEVER))))

    def _follow(self, station: Station, news: list[News]) -> None:
        """Note a station's news, each at its time, and when its next may come."""
        if news:
            fill = station.engine.occupancy()
            heapq.heappush(self._facts, (news[0].at, _NEWS, station.number, (station, news, fill)))
        if station.has_work:
            due = station.next_news_at()
            if self._looked_at.get(station.id) != due:
                self._looked_at[station.id] = due
                heapq.heappush(self._looks, (due, station.number, station))

    # --- requests ---------------------------------------------------------------

    def _arrive(self, row: int, request: TraceRequest, now: float) -> None:
        tokens, digests = self._prompts.make(request)
        made = GenerationRequest(
            request_id=f"r{row}",
            model=self._model,
            prompt_token_ids=cast("list[int]", tokens),  # read like one, and copied as memory
            sampling=SamplingParams(
                max_tokens=request.num_output_tokens, ignore_eos=True, seed=row
            ),
            tenant=request.tenant,
            priority=request.priority,
            arrival_time=now,
            ttft_target_seconds=request.ttft_target_seconds,
            tpot_target_seconds=request.tpot_target_seconds,
            prefix_hashes=digests,
            is_whole=True,
        )
        routing = RoutingRequest(
            model=self._model,
            tenant=request.tenant,
            session=request.session,
            priority=request.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            prefix_hashes=digests,
            expected_output_tokens=self._door.expected_output(
                self._model, request.tenant, request.num_output_tokens
            ),
        )
        self._ask(Caller(row, made, routing), now)

    def _ask(self, caller: Caller, now: float) -> None:
        caller.asks_at = _NEVER
        try:
            if self._door.ask(caller, now):
                self._enter(caller, now)
        except RequestError as error:
            self._refuse(caller, error)
        self._let_woken_ask(now)

    def _refuse(self, caller: Caller, error: RequestError) -> None:
        self.outcomes.refusals[caller.row] = error.reason or error.code

    def _enter(self, caller: Caller, now: float) -> None:
        """Send an admitted request to the replica that routing chooses now."""
        replica = self._router.choose(caller.routing, now)
        station = self._stations[replica.id]
        hold = self._router.place(replica, caller.routing)
        if station.has_work:
            self._looked_at.pop(station.id, None)
            while station.now < now and station.has_work:
                news = station.run(now)
                if news:
                    self._follow(station, news)
            news = station.step_launched(now)
            if news:
                self._follow(station, news)
        try:
            station.submit(caller.request, now)
        except RequestError as error:
            hold.release()
            self._door.refuse(caller, now)
            self._refuse(caller, error)
            self._follow(station, [])
            return
        self._inside[caller.request.request_id] = _Inside(caller, hold, station)
        self._follow(station, [])

    def _take_news(self, station: Station, news: list[News], fill: tuple[int, int, int]) -> None:
        outcomes = self.outcomes
        for each in news:
            inside = self._inside[each.request_id]
            row = inside.caller.row
            if each.is_first:
                outcomes.first_token_at[row] = each.at
                inside.hold.prefilled()
            if each.is_end:
                outcomes.end_at[row] = each.at
                outcomes.cached_tokens[row] = each.num_cached_tokens
                outcomes.preemptions[row] = each.num_preemptions
                del self._inside[each.request_id]
                inside.hold.release()
                output = inside.caller.request.sampling.max_tokens or 0
                self._door.leave(inside.caller, output, each.at)
        self._note_moment(station, fill, news[0].at)
        self._let_woken_ask(news[0].at)

    def _let_woken_ask(self, now: float) -> None:
        if self._door.is_open:
            return
        for caller in self._door.woken():
            if caller.asks_at != now:
                caller.asks_at = now
                self.ask_at(now, caller)

    def _note_moment(self, station: Station, fill: tuple[int, int, int], now: float) -> None:
        before = self._fill.get(station.id, (0, 0, 0))
        self._fill[station.id] = fill
        sums = self._sums
        for place in range(3):
            sums[place] += fill[place] - before[place]
        if now >= self._next_moment:
            self._next_moment = now + self._moment_gap
            waiting = sums[0] + self._door.num_waiting
            self.outcomes.moments.append(Moment(now, waiting, sums[1], sums[2] / self._num_blocks))
