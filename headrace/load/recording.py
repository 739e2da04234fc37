"""A scheduling policy that writes down each step: what it computed and how long it took.

First come, first served, by file like anybody's policy. `headrace bench --profile` learns from it what passes
between two steps, and benchmarks/fidelity.py how fast the machine was from moment to moment. It is made for
requests with one choice: of several, their tokens of a step are told in one sum.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from headrace.load.report import LoadReport
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.types import RequestView, SchedulerView, StepFacts


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one step computed, as headrace.step_time counts it."""

    end: float
    """By the engine's clock, which is time.monotonic."""
    seconds: float
    num_prefill_tokens: int
    num_sequences: int
    num_kv_rows: int


class RecordingFcfs(FirstComeFirstServed):
    name: ClassVar[str] = "recording_fcfs"
    needs_prefixes: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """The file that gets a line per step."""

        file: str

    def __init__(self, options: Options) -> None:
        self._file = Path(options.file).open("a", buffering=1)
        weakref.finalize(self, self._file.close)
        self._rows: dict[str, int] = {}
        """Request to the rows of keys and values it has."""

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        for request in waiting:
            self._rows[request.request_id] = request.num_cached_tokens
        return super().rank_waiting(waiting, view)

    def observe(self, step: StepFacts) -> None:
        num_prefill_tokens = num_kv_rows = 0
        for name, count in step.tokens.items():
            self._rows[name] = self._rows.get(name, 0) + count
            num_kv_rows += self._rows[name]
            num_prefill_tokens += count if count > 1 else 0
        for name in step.finished:
            self._rows.pop(name, None)
        facts = (step.now, step.step_seconds, num_prefill_tokens, len(step.tokens), num_kv_rows)
        self._file.write(json.dumps(facts) + "\n")


def with_recording(arguments: Sequence[str], file: Path) -> list[str]:
    """Return arguments of `headrace serve` with which its first model, one replica, writes its steps down."""
    policy, replicas = "models.0.policies.scheduling", "models.0.replicas"
    chosen = {"use": f"{__file__}:{RecordingFcfs.__name__}", "options": {"file": str(file)}}
    kept: list[str] = []
    for word in arguments:
        if kept and kept[-1] == "--set" and word.startswith((policy, replicas)):
            kept.pop()
        else:
            kept.append(word)
    return [*kept, "--set", f"{policy}={json.dumps(chosen)}", "--set", f"{replicas}=1"]


def read_steps(file: Path) -> list[RecordedStep]:
    """Return the steps written down so far."""
    lines = file.read_text().splitlines()
    return [RecordedStep(*json.loads(line)) for line in lines if line.endswith("]")]


def seconds_until_seen(report: LoadReport, steps: Sequence[RecordedStep]) -> list[float]:
    """Return how much later each request's first token came than its prompt's steps alone would give it.

    Only of requests that found an idle engine.
    """
    found = []
    for outcome in report.outcomes:
        if outcome.ttft_seconds is None:
            continue
        start = report.started_at + outcome.start_seconds
        end = start + outcome.ttft_seconds
        running = [step for step in steps if step.end > start and step.end - step.seconds < end]
        computed = [step.seconds for step in running if step.end <= end and step.num_prefill_tokens]
        if computed and all(step.end - step.seconds >= start for step in running):
            found.append(outcome.ttft_seconds - sum(computed))
    return found


def gaps_between_decodes(steps: Sequence[RecordedStep]) -> Mapping[int, list[float]]:
    """Return what passed between two steps of as many decodes each, by their number, in seconds.

    From the end of one to the beginning of the next: planning, arrays, news. Steps with prompt tokens, and
    the first after such or after another number, are left out: somebody came or went there.
    """
    found: dict[int, list[float]] = {}
    for before, step in zip(steps, steps[1:], strict=False):
        is_alike = before.num_sequences == step.num_sequences
        if is_alike and not (before.num_prefill_tokens or step.num_prefill_tokens):
            gap = max(0.0, step.end - step.seconds - before.end)
            found.setdefault(step.num_sequences, []).append(gap)
    return found
