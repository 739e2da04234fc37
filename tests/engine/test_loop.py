"""The loop answers and aborts between two steps, survives a failing step, and sleeps when idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from headrace.engine.loop import EngineLoop
from headrace.engine.outbox import EventBuffer, Outbox
from headrace.testing.fake_engine import FAILING_TOKEN, FakeEngine, fake_card
from headrace.types import (
    Abort,
    Accepted,
    EngineStats,
    Failed,
    FromEngine,
    GenerationRequest,
    Progress,
    Ready,
    Refused,
    SamplingParams,
    StepEvents,
    Stop,
    Submit,
    TokenAlternative,
    TokenEvent,
    TokenLogprobs,
)


def request(name: str, *, token: int = 1, max_tokens: int = 3, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[token],
        sampling=SamplingParams(max_tokens=max_tokens, n=n),
    )


def run(engine: FakeEngine, *frames: Submit | Abort | Stop) -> list[FromEngine]:
    """Run a loop over messages that are all there from the start, until its work is done."""
    said: list[FromEngine] = []
    loop = EngineLoop(engine, said.append)

    def stop_when_idle() -> None:
        wait_idle(engine)
        loop.post(Stop())

    stopper = threading.Thread(target=stop_when_idle)
    for frame in frames:
        loop.post(frame)
    stopper.start()
    try:
        loop.run()
    finally:
        stopper.join()
    return said


def wait_idle(engine: FakeEngine) -> None:
    deadline = time.monotonic() + 10
    while engine.stats().steps_total == 0 or engine.has_work():
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)


@contextmanager
def running(engine: FakeEngine, said: list[FromEngine]) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, said.append)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.post(Stop())
        thread.join(10)
        assert not thread.is_alive()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


def events(said: list[FromEngine], name: str) -> list[TokenEvent]:
    return [
        event
        for frame in said
        if isinstance(frame, StepEvents)
        for event in frame.events
        if event.request_id == name
    ]


def test_a_request_is_accepted_before_its_events_and_one_frame_says_all_of_a_step() -> None:
    said = run(FakeEngine(), Submit(request("a")), Submit(request("b", max_tokens=2)))

    assert said[:2] == [Accepted("a"), Accepted("b")]
    steps = [frame for frame in said[2:] if isinstance(frame, StepEvents)]
    assert [[event.request_id for event in step.events] for step in steps] == [
        ["a", "b"],
        ["a", "b"],
        ["a"],
    ]
    assert [event.finish_reason for event in events(said, "a")] == [None, None, "length"]
    assert steps[-1].stats.num_running == 0


def test_a_refusal_is_an_answer_and_nothing_else() -> None:
    said = run(FakeEngine(), Submit(request("bad", token=0)), Submit(request("good")))

    assert isinstance(said[0], Refused)
    assert said[0].error.param == "prompt" and said[0].error.http_status == 400
    assert said[1] == Accepted("good")


def test_a_live_id_is_refused_a_second_time_and_the_first_is_unharmed() -> None:
    said = run(FakeEngine(), Submit(request("a")), Submit(request("a")))

    assert said[0] == Accepted("a")
    assert isinstance(said[1], Refused) and "already running" in said[1].error.message
    assert [event.token_ids for event in events(said, "a")] == [[1], [2], [3]]


def test_an_id_can_be_used_again_right_after_its_abort() -> None:
    engine = FakeEngine()
    said = run(engine, Submit(request("a")), Abort("a"), Submit(request("a", max_tokens=1)))

    assert said[:2] == [Accepted("a"), Accepted("a")]
    assert [event.finish_reason for event in events(said, "a")] == ["length"]


def test_an_abort_takes_effect_before_the_next_step_even_while_queued() -> None:
    engine = FakeEngine(max_running=1)
    queued = [Submit(request(f"q{i}")) for i in range(20)]
    said = run(engine, Submit(request("a")), *queued, *(Abort(f"q{i}") for i in range(20)))

    assert engine.prefilled == ["a"]
    assert [event.token_ids for event in events(said, "a")] == [[1], [2], [3]]
    assert not any(events(said, f"q{i}") for i in range(20))


def test_an_abort_of_the_last_request_is_seen_in_the_gauges_without_another_step() -> None:
    engine, said = FakeEngine(step_seconds=0.002), list[FromEngine]()
    with running(engine, said) as loop:
        loop.post(Submit(request("a", max_tokens=100_000)))
        until(lambda: events(said, "a"))
        loop.post(Abort("a"))
        until(lambda: isinstance(said[-1], StepEvents) and said[-1].stats.num_running == 0)

    assert engine.aborted == ["a"]


def test_an_abort_of_an_unknown_or_finished_request_does_not_reach_the_engine() -> None:
    engine = FakeEngine()
    run(engine, Abort("never"), Submit(request("a", max_tokens=1)))

    assert engine.aborted == []


def test_a_step_that_raises_ends_its_requests_with_an_error_and_the_engine_goes_on() -> None:
    engine, said = FakeEngine(), list[FromEngine]()
    with running(engine, said) as loop:
        loop.post(Submit(request("bad", token=FAILING_TOKEN, max_tokens=9, n=2)))
        until(lambda: len([e for e in events(said, "bad") if e.finish_reason]) == 2)
        loop.post(Submit(request("good", max_tokens=1)))
        until(lambda: events(said, "good"))

    last = events(said, "bad")[-2:]
    assert [(event.index, event.finish_reason) for event in last] == [(0, "error"), (1, "error")]
    assert last[0].error is not None and last[0].error.code == "engine_failed"
    assert "RuntimeError" in last[0].error.message and "/secret" not in last[0].error.message
    assert engine.aborted == ["bad"]
    assert events(said, "good")[0].finish_reason == "length"


def test_two_failing_steps_in_a_row_are_the_end_of_the_engine() -> None:
    class Broken(FakeEngine):
        def step(self) -> list[TokenEvent]:
            super().step()
            raise RuntimeError("device lost")

        def has_work(self) -> bool:
            return True

    said: list[FromEngine] = []
    loop = EngineLoop(Broken(), said.append)
    loop.post(Submit(request("a")))

    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()
    assert [event.finish_reason for event in events(said, "a")] == ["error"]


def test_a_bug_in_submit_is_an_answer_too() -> None:
    class Bug(FakeEngine):
        def submit(self, request: GenerationRequest) -> None:
            if request.request_id == "a":
                raise KeyError("oops")
            super().submit(request)

    said = run(Bug(), Submit(request("a")), Submit(request("b")))

    assert isinstance(said[0], Refused) and said[0].error.http_status == 500
    assert said[1] == Accepted("b")


def test_an_idle_loop_uses_no_processor_time() -> None:
    engine, said = FakeEngine(), list[FromEngine]()
    with running(engine, said):
        started = time.process_time()
        threading.Event().wait(0.3)
        used = time.process_time() - started

    assert used < 0.15
    assert said == []


def test_the_first_numbers_are_there_before_the_engine_is_ready() -> None:
    outbox = Outbox()
    EngineLoop(FakeEngine(), outbox.put).announce(fake_card())

    assert outbox.take() == [StepEvents([], FakeEngine().stats()), Ready(fake_card())]


def test_an_engine_with_work_that_it_cannot_run_is_not_spun() -> None:
    class Stuck(FakeEngine):
        calls = 0

        def has_work(self) -> bool:
            return True

        def step(self) -> list[TokenEvent]:
            self.calls += 1
            return []

    engine = Stuck()
    with running(engine, []):
        threading.Event().wait(0.2)

    assert 1 < engine.calls <= 120


def test_stop_leaves_the_rest_undone() -> None:
    engine = FakeEngine()
    loop = EngineLoop(engine, lambda frame: None)
    loop.post(Submit(request("a")))
    loop.post(Stop())
    loop.run()

    assert engine.stats().steps_total == 0


def event(name: str, token: int, *, index: int = 0, end: str | None = None) -> TokenEvent:
    alternative = TokenAlternative(token, -1.0, str(token), b"")
    return TokenEvent(
        request_id=name,
        index=index,
        token_ids=[token],
        text=str(token),
        logprobs=[TokenLogprobs(alternative, [])],
        prompt_logprobs=[None] if token == 1 else None,
        finish_reason=end,
    )


def test_events_of_one_choice_join_and_lose_nothing() -> None:
    buffer = EventBuffer()
    for item in (event("a", 1), event("a", 1, index=1), event("a", 2), event("a", 3, end="stop")):
        buffer.add(item)

    assert len(buffer) == 2
    joined, other = buffer.take()
    assert (joined.token_ids, joined.text, joined.finish_reason) == ([1, 2, 3], "123", "stop")
    assert joined.prompt_logprobs == [None]
    assert [entry.chosen.token_id for entry in joined.logprobs or []] == [1, 2, 3]
    assert other == event("a", 1, index=1)
    assert buffer.take() == []


def test_joining_leaves_the_first_event_as_it_was() -> None:
    first, buffer = event("a", 1), EventBuffer()
    buffer.add(first)
    buffer.add(event("a", 2))
    buffer.take()

    assert first == event("a", 1)


def test_the_outbox_holds_one_event_per_choice_however_long_nobody_reads() -> None:
    outbox = Outbox()
    assert outbox.put(Progress("load", 0.1))
    assert not outbox.put(Progress("load", 0.9))
    outbox.put(Accepted("a"))
    for step in range(1000):
        outbox.put(StepEvents([event("a", step)], EngineStats(steps_total=step), 0.5))
    outbox.put(Failed("end"))
    outbox.put(Accepted("b"))

    progress, accepted, also_accepted, news, failed = outbox.take()
    assert (progress, accepted, also_accepted) == (
        Progress("load", 0.9),
        Accepted("a"),
        Accepted("b"),
    )
    assert isinstance(news, StepEvents) and failed == Failed("end")
    assert [len(item.token_ids) for item in news.events] == [1000]
    assert news.stats.steps_total == 999 and news.step_seconds == 500.0
    assert outbox.take() == []
    assert outbox.put(Failed("again"))


def test_the_outbox_forgets_the_events_of_an_id_that_is_accepted_anew() -> None:
    outbox = Outbox()
    outbox.put(StepEvents([event("a", 1), event("b", 1)], EngineStats()))
    outbox.put(Accepted("a"))

    accepted, news = outbox.take()
    assert accepted == Accepted("a") and isinstance(news, StepEvents)
    assert [item.request_id for item in news.events] == ["b"]


def test_a_closed_outbox_wakes_its_reader_once_empty() -> None:
    outbox, taken = Outbox(), list[list[FromEngine]]()
    reader = threading.Thread(target=lambda: taken.append(outbox.take(timeout=None)))
    reader.start()
    outbox.close()
    reader.join(10)

    assert taken == [[]]


def test_moments_without_work_are_used_until_a_request_comes() -> None:
    class Busybody(FakeEngine):
        num_prepared = 0
        num_at_submit = -1

        def prepare(self) -> bool:
            self.num_prepared += 1
            if self.num_prepared == 3:
                loop.post(Submit(request("a")))
            if self.num_prepared == 6:
                loop.post(Stop())
            return True

        def submit(self, request: GenerationRequest) -> None:
            self.num_at_submit = self.num_prepared
            super().submit(request)

    engine = Busybody()
    said: list[FromEngine] = []
    loop = EngineLoop(engine, said.append)
    loop.run()
    assert (engine.num_at_submit, engine.num_prepared) == (3, 6)
    assert len(events(said, "a")) == 3


def test_the_engine_comes_to_rest_once_after_each_burst_of_work() -> None:
    rests: list[str] = []
    engine = FakeEngine()
    loop = EngineLoop(engine, lambda frame: None, lambda: rests.append("rest"))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        until(lambda: len(rests) == 1)
        for number in (2, 3):
            loop.post(Submit(request(f"burst {number}")))
            until(lambda: engine.stats().steps_total > 0 and not engine.has_work())
            until(lambda number=number: len(rests) == number)  # type: ignore[misc]
    finally:
        loop.post(Stop())
        thread.join()
    assert len(rests) == 3
