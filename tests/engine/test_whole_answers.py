"""A request whose answer is wanted in one piece: its first news, its end, and nothing between."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.loop import EngineLoop
from headrace.engine.output import SequenceOutput, TokenRow
from headrace.errors import EngineFailed
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.tokenizers import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer
from headrace.types import (
    Abort,
    Accepted,
    FromEngine,
    GenerationRequest,
    SamplingParams,
    StepEvents,
    Stop,
    Submit,
    TokenEvent,
)

TINY = Tokenizer(tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False)
EOS, THE, SPECIAL = 348, 256, 347
TOKENS = st.lists(
    st.sampled_from([97, 98, 0xF0, 0x9F, 0x98, 0x80, 0xFF, THE, EOS, SPECIAL]), max_size=20
)
SAMPLING = st.builds(
    SamplingParams,
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (97, 0xF0)]),
    stop=st.sampled_from([(), ("ab",), ("a\u00e9",)]),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([None, 1]),
)


def output_of(sampling: SamplingParams, max_tokens: int, *, is_whole: bool) -> SequenceOutput:
    return SequenceOutput(
        TINY,
        request_id="r",
        index=0,
        sampling=sampling,
        eos_token_ids=(EOS,),
        max_tokens=max_tokens,
        is_whole=is_whole,
    )


def take(output: SequenceOutput, token_id: int) -> TokenEvent | None:
    if output.finish_reason is None and token_id % 3:
        return output.append((TokenRow(token_id, -0.5, ((token_id, -0.5),)),))
    return output.append_token(token_id)


def joined(events: list[TokenEvent]) -> tuple[object, ...]:
    return (
        "".join(event.text for event in events),
        [token_id for event in events for token_id in event.token_ids],
        [entry for event in events for entry in event.logprobs or ()],
        events[-1].finish_reason,
        events[-1].stop_reason,
        events[-1].error,
    )


@given(tokens=TOKENS, sampling=SAMPLING, max_tokens=st.integers(3, 20))
def test_first_news_and_end_say_together_what_every_token_says(
    tokens: list[int], sampling: SamplingParams, max_tokens: int
) -> None:
    """S01, S03, T08: whatever ends the choice, and whichever way a token comes in."""
    said: list[list[TokenEvent]] = []
    for is_whole in (False, True):
        output = output_of(sampling, max_tokens, is_whole=is_whole)
        events = [take(output, token_id) for token_id in tokens]
        events.append(output.finish("error", error=EngineFailed("the device is lost").info()))
        said.append([event for event in events if event is not None])
        assert said[-1][-1].finish_reason is not None
    assert joined(said[0]) == joined(said[1])
    assert said[1][0] == said[0][0] and len(said[1]) <= 2


@given(tokens=TOKENS, num_first=st.integers(0, 4))
def test_runs_of_tokens_are_told_at_the_end_too(tokens: list[int], num_first: int) -> None:
    sampling = SamplingParams(ignore_eos=True)
    output = output_of(sampling, len(tokens) + 1, is_whole=True)
    events = [output.append_token(token_id) for token_id in tokens[:num_first]]
    events += [output.append_run(tokens[num_first:]), output.append_run([97])]
    said = [event for event in events if event is not None]
    text, token_ids, *_ = joined(said)
    assert text == TINY.decode([*tokens, 97], continuation=True)
    assert token_ids == [*tokens, 97] and len(said) <= 2


def request(name: str, *, max_tokens: int = 3, is_whole: bool = True) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=max_tokens),
        is_whole=is_whole,
    )


def said_by(engine: FakeEngine, *frames: Submit | Abort) -> list[FromEngine]:
    """Run the loop in this thread until the engine has nothing to do."""
    said: list[FromEngine] = []
    loop = EngineLoop(engine, said.append)

    def stop_when_idle() -> None:
        deadline = time.monotonic() + 10
        while engine.stats().steps_total == 0 or engine.has_work():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        loop.post(Stop())

    for frame in frames:
        loop.post(frame)
    stopper = threading.Thread(target=stop_when_idle)
    stopper.start()
    loop.run()
    stopper.join()
    return said


class Quiet(FakeEngine):
    """Says only how a request ends, as an engine does of whole answers."""

    def step(self) -> list[TokenEvent]:
        return [event for event in super().step() if event.finish_reason is not None]


def test_it_is_accepted_with_the_news_of_its_first_step_and_a_stream_at_once() -> None:
    said = said_by(FakeEngine(), Submit(request("w")), Submit(request("s", is_whole=False)))
    assert said[:2] == [Accepted("s"), Accepted("w")]
    assert isinstance(said[2], StepEvents)


def test_steps_without_news_send_no_frame_each_and_the_last_numbers_are_told() -> None:
    said = said_by(Quiet(), Submit(request("a", max_tokens=500)))
    steps = [frame for frame in said if isinstance(frame, StepEvents)]
    assert steps[-1].stats.steps_total == 500 and steps[-1].stats.num_running == 0
    assert len(steps) < 250
    assert [event.request_id for frame in steps for event in frame.events] == ["a"]


def test_numbers_go_out_while_there_is_no_news() -> None:
    engine = Quiet(step_seconds=0.01)
    said = said_by(engine, Submit(request("a", max_tokens=20)))
    assert any(isinstance(f, StepEvents) and not f.events and f.stats.num_running for f in said[2:])


def test_one_that_is_aborted_before_its_first_step_is_forgotten() -> None:
    engine = FakeEngine()
    said = said_by(engine, Submit(request("a")), Abort("a"), Submit(request("b", max_tokens=1)))
    assert engine.prefilled == ["b"]
    assert {event.request_id for f in said if isinstance(f, StepEvents) for event in f.events} == {
        "b"
    }
