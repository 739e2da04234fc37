"""Steps that the workers compute and draw beside their caller: the same tokens, whatever comes between."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.beside import MAX_TOKENS, BesideTrial
from headrace.backends.cpu.fast.cores import Seat
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings, ForwardBatch, StepResult

PROMPTS = ([5, 9, 14, 200, 31], [40, 41, 42])
TABLES = (range(6), range(6, 12))
COLUMNS: dict[str, dict[str, list[float]]] = {
    "greedy": {},
    "drawn": {"temperature": [0.9, 1.3], "seeds": [4, 5], "top_k": [0, 20], "top_p": [0.9, 1.0]},
    "with log probabilities": {"temperature": [0.0, 1.0], "num_logprobs": [3, 0], "seeds": [1, 2]},
}
Make = Callable[..., FastRunner]


@pytest.fixture
def make(tiny_checkpoint: Callable[..., Path]) -> Iterator[Make]:
    """Return `make(num_threads)`, a runner with a pool; all are closed at the end."""
    made = []

    def make(num_threads: int, architecture: str = "llama") -> FastRunner:
        settings = EngineSettings(num_threads=num_threads, max_model_len=256)
        model = open_checkpoint(tiny_checkpoint(architecture))
        made.append(FastRunner(model, SingleRank(), settings))
        made[-1].allocate(16)
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def step(
    runner: FastRunner,
    tokens: list[list[int]],
    done: list[int],
    columns: dict[str, list[float]],
    sources: list[int] | None = None,
) -> ForwardBatch:
    steps = [SequenceStep(t, d, b) for t, d, b in zip(tokens, done, TABLES, strict=False)]
    positions = [d + len(t) for t, d in zip(tokens, done, strict=True)]
    sampling = sampling_batch(len(steps), {**columns, "positions": positions})
    return forward_batch(
        steps, block_size=16, num_groups=len(runner.kv_groups()), sampling=sampling,
        token_sources=sources,
    )  # fmt: skip


def executed(runner: FastRunner, batch: ForwardBatch) -> StepResult:
    handle = runner.execute(batch)
    handle.sample()
    return handle.result()


def flat(result: StepResult) -> list[Any]:
    lists = (result.token_ids, result.logprobs, result.top_token_ids, result.top_logprobs)
    return [None if array is None else array.tolist() for array in lists]


def one_by_one(runner: FastRunner, columns: dict[str, list[float]], count: int) -> list[Any]:
    result = executed(runner, step(runner, [list(p) for p in PROMPTS], [0, 0], columns))
    found, done = [flat(result)], [len(p) for p in PROMPTS]
    for _ in range(count):
        tokens = [[token] for token in result.token_ids.tolist()]
        result = executed(runner, step(runner, tokens, done, columns))
        done = [d + 1 for d in done]
        found.append(flat(result))
    return found


def ahead(runner: FastRunner, columns: dict[str, list[float]], count: int) -> list[Any]:
    """The same, each step launched before the tokens it begins with are known."""
    found = [flat(executed(runner, step(runner, [list(p) for p in PROMPTS], [0, 0], columns)))]
    flying, done = None, [len(p) for p in PROMPTS]
    for _ in range(count):
        batch = step(runner, [[0], [0]], done, columns, sources=[0, 1])
        handle = runner.execute_beside(batch)
        if flying is not None:
            found.append(flat(flying.result()))
        flying, done = handle, [d + 1 for d in done]
    assert flying is not None
    return [*found, flat(flying.result())]


@pytest.mark.parametrize("num_threads", [2, 3, 4])
@pytest.mark.parametrize("columns", COLUMNS)
def test_steps_ahead_give_what_single_steps_give(
    columns: str, num_threads: int, make: Make
) -> None:
    expected = one_by_one(make(1), COLUMNS[columns], 24)
    assert ahead(make(num_threads), COLUMNS[columns], 24) == expected


@pytest.mark.parametrize("columns", COLUMNS)
def test_whenever_a_caller_joins_the_numbers_are_the_same(columns: str, smollm2_gguf: Path) -> None:
    """The real model: its steps last milliseconds, so that the caller comes at every place of one."""
    model, chosen = open_checkpoint(smollm2_gguf), COLUMNS[columns]
    prompts, count = [list(range(300, 330)), list(range(400, 410))], 60

    def drawn(num_threads: int) -> tuple[list[Any], list[Any], int]:
        settings = EngineSettings(num_threads=num_threads, max_model_len=256)
        runner = FastRunner(model, SingleRank(), settings)
        runner.allocate(16)
        found, logits, num_joined = [], [], 0
        try:
            result = executed(runner, step(runner, prompts, [0, 0], chosen))
            for index in range(count):
                tokens = [[token] for token in result.token_ids.tolist()]
                batch = step(runner, tokens, [len(p) + index for p in prompts], chosen)
                if num_threads > 1:
                    handle: Any = runner.execute_beside(batch)
                    time.sleep(0.0001 * (index % 40))
                    result = handle.result()
                    num_joined += int(handle._step.parameters[at.JOIN]) == 2
                else:
                    result = executed(runner, batch)
                found.append(flat(result))
                logits.append(runner.last_logits())
        finally:
            runner.close()
        return found, logits, num_joined

    (expected, exact, none), (found, shared, some) = drawn(1), drawn(2)
    assert none == 0 < some
    assert found == expected
    np.testing.assert_array_equal(shared, exact)


def test_nobody_joins_where_the_other_core_is_taken(make: Make) -> None:
    runner = make(2)
    threads = runner._threads
    assert threads is not None
    governor = threads._governors_beside.of(2)
    for _ in range(2):
        governor.observe(1.0, 10.0)  # disturbed, so that one thread is as good
    handle = runner.execute_beside(step(runner, [[1], [2]], [5, 3], {}))
    handle.result()
    assert handle._step.parameters[at.JOIN] == 0


def test_more_workers_than_one_are_not_joined(make: Make) -> None:
    two, three = make(2), make(3)
    assert two.runs_beside(64, 5000) and not two.runs_beside(65, 65)
    assert three.runs_beside(4, 100) and not three.runs_beside(5, 100)
    handle = three.execute_beside(step(three, [[1], [2]], [5, 3], {}))
    handle.result()
    assert handle._step.parameters[at.JOIN] == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be moved here")
def test_a_thread_leaves_the_core_of_another() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    here, *others = sorted(allowed)
    try:
        os.sched_setaffinity(0, {here})  # sits there now
        os.sched_setaffinity(0, allowed)
        seat = Seat()
        taken = {core for core in allowed if core != others[0]}
        moved = seat.leave(taken)
        assert moved and seat._core is not None and seat._core() == others[0]
        assert os.sched_getaffinity(0) == allowed
        assert not seat.leave([-1]) and not seat.leave(allowed)
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be moved here")
def test_where_threads_may_not_be_moved_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a filter of system calls: it costs time, never a step."""
    asked = []

    def refuse(pid: int, cores: object) -> None:
        asked.append(cores)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    seat = Seat()
    monkeypatch.setattr(seat, "_core", lambda: 1)
    assert not seat.leave({1}) and not seat.leave({1})
    assert 1 <= len(asked) <= 2, "asked once, and set back once"


def test_a_row_may_come_from_any_row_of_the_step_before(make: Make) -> None:
    runner, other = make(2), make(1)
    prompts = [list(p) for p in PROMPTS]
    first = executed(runner, step(runner, prompts, [0, 0], {})).token_ids.tolist()
    executed(other, step(other, prompts, [0, 0], {}))
    handle = runner.execute_beside(step(runner, [[0], [7]], [5, 3], {}, sources=[1, -1]))
    expected = executed(other, step(other, [[first[1]], [7]], [5, 3], {}))
    assert handle.result().token_ids.tolist() == expected.token_ids.tolist()


def decide(trial: BesideTrial, beside: float, together: float, steps: int) -> list[bool]:
    """Tell a trial what decodes of one sequence take either way; return which way each had."""
    now, ways = 0.0, []
    for _ in range(steps):
        ways.append(trial.allows(1, 100))
        now += beside if ways[-1] else together
        trial.note(1, 100, beside=ways[-1], begun=now - 0.001, now=now)
    return ways


def test_the_better_way_is_found_kept_and_tried_again() -> None:
    ways = decide(BesideTrial(), 0.003, 0.004, 4000)
    assert sum(ways) > 0.95 * len(ways) and not all(ways[:40]) and not all(ways[1000:])
    ways = decide(BesideTrial(), 0.005, 0.004, 4000)
    assert sum(ways) < 0.05 * len(ways) and any(ways[1000:])


def test_pauses_other_sizes_and_large_steps_are_not_counted() -> None:
    trial = BesideTrial()
    for size in range(200):  # alternating sizes, none of which follows itself
        trial.note(1 + size % 2, 100, beside=True, begun=size, now=size + 0.5)
    for second in range(200):  # a pause before each
        trial.note(1, 100, beside=True, begun=second + 0.9, now=second + 1.0)
    assert trial.allows(1, 100) and trial.allows(2, 100)
    assert not trial.allows(MAX_TOKENS + 1, 100)


def test_one_thread_has_nobody_to_leave_a_step_to(make: Make) -> None:
    assert make(2).runs_beside(1, 5)
    assert not make(1).runs_beside(1, 5)


def test_what_is_asked_between_waits_for_the_step_in_flight(make: Make) -> None:
    """A step of all threads, a look at the cache and a copy of blocks come behind what was launched."""
    runner, other = make(2), make(1)
    prompts = [list(p) for p in PROMPTS]
    for each in (runner, other):
        executed(each, step(each, prompts, [0, 0], {}))
    batch = step(runner, [[11], [12]], [5, 3], {})
    beside = runner.execute_beside(batch)
    keys, values = runner.read_rows(0, [5, 6 * 16 + 3])
    assert keys.any(axis=(1, 2)).all() and values.any(axis=(1, 2)).all()
    runner.copy_blocks([(0, 12)])
    np.testing.assert_array_equal(runner.read_rows(0, [12 * 16 + 5])[0][0], keys[0])
    again = runner.execute_beside(step(runner, [[13], [14]], [6, 4], {}))
    direct = executed(runner, step(runner, [[15], [16]], [7, 5], {}))
    expected = [
        executed(other, step(other, tokens, done, {})).token_ids.tolist()
        for tokens, done in (([[11], [12]], [5, 3]), ([[13], [14]], [6, 4]), ([[15], [16]], [7, 5]))
    ]
    results = [beside.result(), again.result(), direct]
    assert [result.token_ids.tolist() for result in results] == expected


def test_broken_numbers_fail_their_row_alone(make: Make) -> None:
    runner = make(2)
    executed(runner, step(runner, [list(p) for p in PROMPTS], [0, 0], {}))
    keys, values = runner.read_rows(0, [2])
    runner.write_rows(0, [2], keys, np.full_like(values, np.nan))
    handle = runner.execute_beside(step(runner, [[1], [2]], [5, 3], {}))
    following = runner.execute_beside(step(runner, [[0], [0]], [6, 4], {}, sources=[0, 1]))
    assert handle.result().failed.tolist() == [True, False]
    assert following.result().failed.tolist() == [True, False]


def test_closing_waits_for_what_is_in_flight_and_idle_workers_park(make: Make) -> None:
    runner = make(3)
    batch = step(runner, [[1], [2]], [0, 0], {})
    for _ in range(3):
        handles = [runner.execute_beside(batch) for _ in range(2)]
        for handle in handles:
            handle.result()
        end = time.monotonic() + 30
        threads = runner._threads
        assert threads is not None
        while threads.num_parked() < 2 and time.monotonic() < end:
            time.sleep(0.005)
        assert threads.num_parked() == 2
    runner.execute_beside(batch)
    runner.close()


def test_a_runner_nobody_closed_leaves_its_pool_to_its_workers(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model = open_checkpoint(tiny_checkpoint("llama"))
    runner = FastRunner(model, SingleRank(), EngineSettings(num_threads=2, max_model_len=256))
    runner.allocate(16)
    executed(runner, step(runner, [[1], [2]], [5, 3], {}))
    runner.execute_beside(step(runner, [[1], [2]], [5, 3], {}))
    threads, pool = runner._threads, weakref.ref(runner._kv())
    assert threads is not None
    del runner
    gc.collect()
    assert pool() is not None
    threads.close()
    del threads
    gc.collect()
    assert pool() is None


def test_workers_end_where_there_are_not_enough_of_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start
    before = set(threading.enumerate())

    def start(thread: threading.Thread) -> None:
        if thread.name == "headrace-cpu-3":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        make(4)
    assert set(threading.enumerate()) <= before


def test_a_step_is_timed_from_its_launch_however_late_its_caller_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a wait of some microseconds is compared with all that its threads waited for each other."""
    runner, seconds = make(3), []
    threads = runner._threads
    assert threads is not None
    monkeypatch.setattr(
        threads._governors_beside.of(2), "observe", lambda share, took: seconds.append(took)
    )
    handles = [runner.execute_beside(step(runner, [[1], [2]], [5, 3], {})) for _ in range(2)]
    time.sleep(0.05)
    for handle in handles:
        handle.result()
    assert seconds[0] >= 0.05 > seconds[1] > 0
