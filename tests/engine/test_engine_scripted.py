"""Known tokens through the real engine, operations and draw: what a choice says and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.runner import OpsRunner
from headrace.clock import SystemClock
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.testing import open_scripted, write_script
from headrace.testing.clock import FakeClock
from headrace.testing.engine_driver import EngineDriver
from headrace.testing.numpy_ops import NumpyOps
from headrace.text.tokenizer import Tokenizer
from headrace.types import EngineSettings, TokenEvent

EMOJI = "🫠".encode()
Say = Callable[..., EngineDriver]


def numpy_runner(model: LoadedModel, settings: EngineSettings) -> Runner:
    return OpsRunner(NumpyOps(), model, SingleRank(), settings, schemes=NumpyOps.schemes)


def cpu_runner(model: LoadedModel, settings: EngineSettings) -> Runner:
    from headrace.backends.cpu.backend import CpuBackend

    return CpuBackend.open(0, None, SystemClock()).create_runner(model, SingleRank(), settings)


@pytest.fixture(params=[numpy_runner, cpu_runner])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Say:
    """Return `make(outputs, **script)`: an engine over a script."""

    def make(outputs: list[Any], **script: Any) -> EngineDriver:
        model = open_scripted(write_script(tmp_path / "script.json", outputs, **script), "s")
        settings = EngineSettings(
            dtype="float32", kv_dtype="float32", max_model_len=512, block_size=16
        )
        runner = request.param(model, settings)
        runner.allocate(64)
        text = model.text
        tokenizer = Tokenizer(
            text.tokenizer_json, special_tokens=text.special_tokens, add_bos_token=False
        )
        vocab_size = model.architecture.vocab_size
        served = ServedModel("m", model.revision, tokenizer, text.eos_token_ids, vocab_size)
        engine = Engine(
            runner,
            model=served,
            settings=settings,
            num_blocks=64,
            policy=FirstComeFirstServed(),
            clock=FakeClock(),
        )
        return EngineDriver(engine, runner, FakeClock())

    return make


def events_of(driver: EngineDriver, **sampling: Any) -> list[TokenEvent]:
    name = driver.submit(list(b"a prompt"), **{"ignore_eos": False, **sampling})
    driver.run()
    driver.assert_empty()
    return driver.events[name, 0]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def ending(events: list[TokenEvent]) -> tuple[str | None, str | int | None]:
    return events[-1].finish_reason, events[-1].stop_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_emoji_of_several_tokens_arrives_whole(make: Say, temperature: float) -> None:
    driver = make(["ob ", EMOJI[:2], EMOJI[2:], " ke"])
    events = events_of(driver, temperature=temperature)
    assert [event.text for event in events] == ["ob ", "🫠", " ke", ""]
    assert ending(events) == ("stop", None)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("DE",), "ABC"),
        (("DEFGHIJ",), "ABC"),
        (("FG", "DEFGHIJ"), "ABCDE"),
        (("XY",), "ABCDEFGHIJ"),
    ],
)
def test_stop_strings_across_tokens(make: Say, stop: tuple[str, ...], text: str) -> None:
    events = events_of(make(["ABC", "DEF", "G", "HI", "J"]), stop=stop)
    assert text_of(events) == text
    assert events[-1].finish_reason == "stop"
    assert all(not event.finish_reason for event in events[:-1])


def test_a_held_prefix_is_delivered_at_the_end(make: Say) -> None:
    driver = make(["UNO", " DUE", " TRE"])
    assert text_of(events_of(driver, stop=("TRE\nAAAA",))) == "UNO DUE TRE"
    cut = events_of(driver, stop=("TRE\nAAAA",), max_tokens=3)
    assert (text_of(cut), ending(cut)) == ("UNO DUE TRE", ("length", None))


def test_min_tokens_and_ignored_eos_go_on(make: Say) -> None:
    driver = make(["a", "b"])
    assert text_of(events_of(driver, ignore_eos=True, max_tokens=7)) == "abab" + "a"
    usage = events_of(driver, ignore_eos=True, max_tokens=7)[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 7


def test_logprobs_follow_the_text(make: Say) -> None:
    driver = make(["a", "ST", "OP", "b"])
    held = events_of(driver, stop=("STOX",), logprobs=0)
    shown = [
        (event.text, "".join(entry.chosen.text for entry in event.logprobs or ())) for event in held
    ]
    assert shown == [("a", "a"), ("STOP", "STOP"), ("b", "b"), ("", "")]
    entries = [entry for event in held for entry in event.logprobs or ()]
    assert all(abs(entry.chosen.logprob) < 1e-3 for entry in entries)


def test_nan_ends_its_request_and_spares_the_others(make: Say) -> None:
    """S12: only the failing request ends."""
    driver = make(["a", "b"], fail_after=1, when={"!": ["x", "y", "z"]})
    bad = driver.submit(list(b"bad"), ignore_eos=False)
    good = driver.submit(list(b"good!"), ignore_eos=False)
    driver.run()
    driver.assert_empty()
    last = driver.last(bad)
    assert last.error is not None
    assert (last.finish_reason, text_of(driver.events[bad, 0])) == ("error", "a")
    assert text_of(driver.events[good, 0]) == "xyz"
    again = driver.submit(list(b"good!"), ignore_eos=False)
    driver.run()
    assert text_of(driver.events[again, 0]) == "xyz"
