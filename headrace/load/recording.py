"""A scheduling policy that writes down each step: what it computed and how long it took.

First come, first served, by file like anybody's policy. `headrace bench --profile` learns from it what passes
between two steps, and benchmarks/fidelity.py how fast the machine was from moment to moment.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
        self._file = Path(options.file).open("w", buffering=1)
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


def recording_arguments(file: Path) -> list[str]:
    """Return the arguments of `headrace serve` that have its first model's steps written down."""
    policy = "models.0.policies.scheduling"
    return [
        *("--set", f"{policy}.use={__file__}:{RecordingFcfs.__name__}"),
        *("--set", f"{policy}.options.file={file}"),
    ]


def read_steps(file: Path) -> list[RecordedStep]:
    """Return the steps written down so far."""
    lines = file.read_text().splitlines()
    return [RecordedStep(*json.loads(line)) for line in lines if line.endswith("]")]


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
