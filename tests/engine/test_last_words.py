"""What an engine process prints of its stacks says which policy it was inside."""

from __future__ import annotations

import faulthandler
import pathlib
from typing import Any

from headrace.engine.last_words import LastWords
from headrace.policies.eviction.lru import LeastRecentlyUsed
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import EvictionGuard, SchedulingGuard
from headrace.types import BlockView, SchedulerView

VIEW = SchedulerView(0.0, 512, 0, 0, 10, 10)


def kind_seen(guarded: Any, tmp_path: pathlib.Path) -> str:
    """Return what is read from the stacks printed by `guarded`, told a file to print them to."""
    path = tmp_path / "stacks"
    with path.open("w") as file:
        guarded(file)
    words = LastWords()
    for line in path.read_text().splitlines():
        words.note(line)
    kind = words.take_kind()
    assert words.take_kind() == ""
    return kind


def test_the_policy_on_the_stack_is_named(tmp_path: pathlib.Path) -> None:
    def in_scheduling(file: Any) -> None:
        class Policy(FirstComeFirstServed):
            def prefill_budget(self, view: SchedulerView) -> int:
                faulthandler.dump_traceback(file, all_threads=False)
                return 1

        SchedulingGuard(Policy(), FirstComeFirstServed()).prefill_budget(VIEW)

    def in_an_observer(file: Any) -> None:
        class Policy(FirstComeFirstServed):
            def observe(self, step: Any) -> None:
                faulthandler.dump_traceback(file, all_threads=False)

        SchedulingGuard(Policy(), FirstComeFirstServed()).observe(None)  # type: ignore[arg-type]

    def in_eviction(file: Any) -> None:
        class Policy(LeastRecentlyUsed):
            def key(self, block: BlockView, now: float) -> tuple[float, float | None]:
                faulthandler.dump_traceback(file, all_threads=False)
                return 1.0, None

        EvictionGuard(Policy(), LeastRecentlyUsed()).key(BlockView(0), 0.0)

    assert kind_seen(in_scheduling, tmp_path) == "scheduling"
    assert kind_seen(in_an_observer, tmp_path) == "scheduling"
    assert kind_seen(in_eviction, tmp_path) == "eviction"


def test_an_engine_that_hangs_elsewhere_blames_no_policy(tmp_path: pathlib.Path) -> None:
    def builtin_decides(file: Any) -> None:
        class Builtin(FirstComeFirstServed):
            def prefill_budget(self, view: SchedulerView) -> int:
                faulthandler.dump_traceback(file, all_threads=False)
                return 1

        guard = SchedulingGuard(FirstComeFirstServed(), Builtin())
        guard.bench("for the test")
        guard.prefill_budget(VIEW)

    def this_thread(file: Any) -> None:
        faulthandler.dump_traceback(file, all_threads=False)

    assert kind_seen(this_thread, tmp_path) == ""
    assert kind_seen(builtin_decides, tmp_path) == ""
