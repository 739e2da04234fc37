"""Latency targets: as many requests as can be inside their targets, late ones last.

After Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving" (arXiv 2503.22562): the
order mixes the earliest deadline with the least remaining work, requests that will miss their target
anyway step aside at once, and a step takes as much of the prompts as the slack of the tightest
decode allows. Who steps aside is chosen as in Moore's rule: where a deadline would be missed, the
longest of those before it goes, which leaves the most requests in time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headrace.types import RequestView, SchedulerView
from headrace.types.units import Bounds, Seconds

_PROBE_TOKENS = 256


class LatencyTargets:
    name: ClassVar[str] = "slo"
    needs_prefixes: ClassVar[bool] = True
    meets_tpot_targets: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        ttft: Seconds = 1.0
        """For requests that bring no target of their own."""
        tpot: Seconds = 0.1
        """As `ttft`, per token after the first."""
        shortness: Annotated[float, Bounds(0.0, None)] = 1.0
        """How much a second of remaining work counts beside a second of deadline; 0: deadlines alone."""
        least_chunk: Annotated[int, Bounds(1, None)] = 32
        """Prompt tokens that a step takes whatever the decodes' slack."""
        patience: Seconds = 60.0
        """Whoever has waited so long goes first, in time or not."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()
        self._next_late_at: float | None = None
        self._num_to_start = 0

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        late_before = view.now - self._options.patience
        first = [request for request in waiting if request.arrival_time <= late_before]
        others = [request for request in waiting if request.arrival_time > late_before]
        first.sort(key=lambda request: request.arrival_time)
        per_token, begin = self._pace(view)
        begin += per_token * sum(_tokens_left(request) for request in first)
        in_time, late = self._in_time(others, begin, per_token)
        latest_starts = [
            self._deadline(request) - per_token * _tokens_left(request) for request in in_time
        ]
        ahead = [time for time in latest_starts if time > view.now]
        ahead += [request.arrival_time + self._options.patience for request in others]
        self._next_late_at = min(ahead, default=None)
        self._num_to_start = len(first) + len(in_time)
        return [*first, *in_time, *late]

    def num_to_start(self, view: SchedulerView) -> int:
        """Late ones start one by one, when no prompt is being computed."""
        return self._num_to_start

    def next_decision_at(self, view: SchedulerView) -> float | None:
        return self._next_late_at

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """The one that has missed its target already, else the one with the latest deadline."""

        def spared(request: RequestView) -> tuple[bool, float]:
            deadline = self._deadline(request)
            return view.now > deadline, deadline

        return max(reversed(running), key=spared)

    def prefill_budget(self, view: SchedulerView) -> int:
        """Return the most tokens that leave the tightest decode in time."""
        decoding = [r for r in view.running() if r.first_token_time is not None]
        if not decoding:
            return view.token_budget
        slack = min(self._deadline(request) for request in decoding) - view.now
        num_kv_rows = sum(request.num_computed_tokens for request in decoding)
        base = view.step_seconds(0, len(decoding), num_kv_rows)
        probe = view.step_seconds(_PROBE_TOKENS, len(decoding), num_kv_rows)
        per_token = (probe - base) / _PROBE_TOKENS
        if per_token <= 0:
            return view.token_budget
        within = int((slack - base) / per_token)
        return min(view.token_budget, max(within, self._options.least_chunk))

    def _pace(self, view: SchedulerView) -> tuple[float, float]:
        """Return the seconds that a prompt token takes now, and when those being computed are done."""
        running = view.running()
        decoding = [request for request in running if request.first_token_time is not None]
        num_kv_rows = sum(request.num_computed_tokens for request in decoding)
        seconds = view.step_seconds(_PROBE_TOKENS, len(decoding), num_kv_rows)
        per_token = max(0.0, seconds / _PROBE_TOKENS)
        under_way = [request for request in running if request.first_token_time is None]
        left = sum(r.num_prompt_tokens - r.num_computed_tokens for r in under_way)
        return per_token, view.now + per_token * left

    def _in_time(
        self, requests: Sequence[RequestView], begin: float, per_token: float
    ) -> tuple[list[RequestView], list[RequestView]]:
        """Return who can be served by their deadlines, in turn, and who steps aside, the shortest first."""

        def turn(request: RequestView) -> tuple[float, float]:
            work = per_token * _tokens_left(request)
            return self._deadline(request) + self._options.shortness * work, request.arrival_time

        ordered = sorted(requests, key=turn)
        kept: list[tuple[float, int]] = []
        aside: set[int] = set()
        done = begin
        for index, request in enumerate(ordered):
            work = per_token * _tokens_left(request)
            heapq.heappush(kept, (-work, index))
            done += work
            if done > self._deadline(request):
                longest, dropped = heapq.heappop(kept)
                done += longest
                aside.add(dropped)
        in_time = [request for index, request in enumerate(ordered) if index not in aside]
        late = [ordered[index] for index in aside]
        late.sort(key=lambda request: (_tokens_left(request), request.arrival_time))
        return in_time, late

    def _deadline(self, request: RequestView) -> float:
        """Return when the next token is due: the first by the TTFT target, the others by the TPOT target."""
        options = self._options
        if request.first_token_time is not None:
            tpot = request.tpot_target_seconds
            tpot = options.tpot if tpot is None else tpot
            return request.first_token_time + tpot * request.num_output_tokens
        ttft = request.ttft_target_seconds
        return request.arrival_time + (options.ttft if ttft is None else ttft)


def _tokens_left(request: RequestView) -> int:
    total = request.num_prompt_tokens + request.num_output_tokens
    return max(1, total - max(request.num_cached_tokens, request.num_computed_tokens))
