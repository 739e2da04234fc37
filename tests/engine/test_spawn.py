"""Starting engine processes: early ones are used once, dead or unwanted ones leave nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from headrace.engine import spawn

SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")
EXTRA = ["--preload=headrace.build"]


@pytest.fixture(autouse=True)
def no_early_process_stays() -> Iterator[None]:
    yield
    spawn._end_early()


def arguments_of(started: spawn.StartedProcess) -> list[str]:
    arguments = started.process.args
    assert isinstance(arguments, list)
    return [str(argument) for argument in arguments]


def test_an_early_process_is_taken_once() -> None:
    spawn.start_early(SLEEPER, EXTRA)
    early = spawn.take(SLEEPER)
    late = spawn.take(SLEEPER)
    try:
        assert early.process.pid != late.process.pid
        assert EXTRA[0] in arguments_of(early) and EXTRA[0] not in arguments_of(late)
    finally:
        for started in (early, late):
            started.end()
    assert not os.path.exists(early.folder)


def test_a_process_of_another_command_is_left_alone() -> None:
    spawn.start_early(SLEEPER)
    (_, early), *_ = spawn._early
    other = spawn.take((*SLEEPER, "other"))
    assert other.process.pid != early.process.pid
    other.end()


def test_an_early_process_that_died_is_replaced() -> None:
    spawn.start_early(SLEEPER)
    (_, early), *_ = spawn._early
    spawn.kill(early.process)
    early.process.wait()
    fresh = spawn.take(SLEEPER)
    assert fresh.process.poll() is None and not os.path.exists(early.folder)
    fresh.end()


def test_an_early_process_nobody_takes_ends_with_this_one() -> None:
    spawn.start_early(SLEEPER)
    (_, early), *_ = spawn._early
    spawn._end_early()
    assert early.process.wait(timeout=30) < 0
    assert not os.path.exists(early.folder)


def test_a_command_that_cannot_be_started_is_told_when_it_is_needed() -> None:
    spawn.start_early(("/nonexistent/program",))
    with pytest.raises(OSError, match="No such file"):
        spawn.take(("/nonexistent/program",))
