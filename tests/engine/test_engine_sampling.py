"""What the engine asks of the sampler, and the prompts it scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.backends.simulated.runner import SimulatedStep
from headrace.testing.engine_driver import EOS_TOKEN_ID, EngineDriver, make_engine_driver
from headrace.testing.engine_driver import generate_alone as alone
from headrace.testing.engine_driver import random_prompt as prompt
from headrace.types import ForwardBatch, SamplingBatch


class Recorder:
    """Keeps every batch that reaches the runner."""

    def __init__(self, driver: EngineDriver) -> None:
        self.batches: list[ForwardBatch] = []
        real: Callable[[ForwardBatch], SimulatedStep] = driver.runner.execute

        def execute(batch: ForwardBatch) -> SimulatedStep:
            self.batches.append(batch)
            return real(batch)

        driver.runner.execute = execute

    def samplings(self) -> list[SamplingBatch]:
        return [batch.sampling for batch in self.batches]


def test_min_tokens_forbids_what_would_end_the_answer_until_then() -> None:
    driver = make_engine_driver()
    recorder = Recorder(driver)
    driver.submit(
        prompt(5), min_tokens=2, max_tokens=4, ignore_eos=False, stop_token_ids=(9,),
        logit_bias={9: 5.0, 7: 1.5},
    )  # fmt: skip
    driver.run()
    asked = [
        dict(zip(s.bias_ids.tolist(), s.bias_values.tolist(), strict=True))
        for s in recorder.samplings()
    ]
    barred = {9: -np.inf, 7: 1.5, EOS_TOKEN_ID: -np.inf}
    assert asked[:2] == [barred, barred]
    assert asked[2] == {9: 5.0, 7: 1.5}


def test_penalties_count_prompt_and_output_tokens_across_preemption() -> None:
    driver = make_engine_driver()
    recorder = Recorder(driver)
    tokens = [5, 6, 5, 7]
    name = driver.submit(tokens, max_tokens=3, presence_penalty=0.5)
    driver.submit(prompt(3), max_tokens=3)
    driver.run()
    first, _, third = recorder.samplings()
    assert first.history_starts.tolist() == [0, 3, 3]
    assert first.history_ids.tolist() == [5, 6, 7]
    assert first.history_counts.tolist() == [0, 0, 0]
    drawn = driver.tokens(name)[:2]
    counts = dict(zip(third.history_ids.tolist(), third.history_counts.tolist(), strict=True))
    assert {token: counts[token] for token in drawn} == {
        token: drawn.count(token) for token in drawn
    }
    assert sum(counts.values()) == 2


def test_penalized_choices_keep_their_own_histories() -> None:
    expected = []
    for slots in (8, 1):
        driver = make_engine_driver(max_num_sequences=slots)
        name = driver.submit(
            prompt(20), n=3, seed=1, temperature=1.0, frequency_penalty=1.0, max_tokens=12
        )
        driver.run()
        expected.append([driver.tokens(name, index) for index in range(3)])
    assert expected[0] == expected[1]


def test_parameters_reach_the_row_of_their_own_sequence() -> None:
    driver = make_engine_driver()
    recorder = Recorder(driver)
    driver.submit(prompt(3), max_tokens=2, temperature=0.5, top_k=-1, logprobs=3, seed=1)
    driver.submit(prompt(4), max_tokens=2, temperature=1.5, top_k=4, top_p=0.9, min_p=0.1)
    driver.step()
    sampling = recorder.samplings()[0]
    assert sampling.temperature.tolist() == [0.5, 1.5]
    assert sampling.top_k.tolist() == [0, 4]
    assert sampling.num_logprobs.tolist() == [3, -1]
    assert sampling.top_p.tolist() == pytest.approx([1.0, 0.9])
    assert sampling.min_p.tolist() == pytest.approx([0.0, 0.1])
    assert sampling.positions.tolist() == [3, 4]


def test_a_stop_token_ends_the_choice_and_frees_its_slot() -> None:
    tokens = prompt(9)
    plain = alone(tokens, max_tokens=12)
    driver = make_engine_driver()
    name = driver.submit(tokens, max_tokens=12, stop_token_ids=(plain[4],))
    driver.run()
    end = plain.index(plain[4])
    assert driver.tokens(name) == plain[: end + 1]
    assert driver.last(name).finish_reason == "stop"
    assert driver.last(name).stop_reason == plain[4]
    driver.assert_empty()


def test_prompt_logprobs_cover_every_token_but_the_first_whatever_the_chunks() -> None:
    tokens = prompt(50)
    reports = []
    for budget in (512, 16, 7):
        driver = make_engine_driver(max_batched_tokens=budget)
        driver.generate(tokens, max_tokens=1)  # a filled cache must not hide rows
        name = driver.submit(tokens, max_tokens=3, prompt_logprobs=2, n=2)
        driver.run()
        told = [e.prompt_logprobs for index in range(2) for e in driver.events[name, index]]
        (report,) = [report for report in told if report is not None]  # once, not once per choice
        reports.append(report)
        assert driver.last(name).usage.cached_tokens == 0  # type: ignore[union-attr]
        driver.assert_empty()
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report[0] is None
    scored = [entry for entry in report if entry is not None]
    assert [entry.chosen.token_id for entry in scored] == tokens[1:]
    assert {len(entry.top) for entry in scored} == {2}


def test_score_rows_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.engine.SCORE_ROW_BYTES", 0)
    driver = make_engine_driver()
    recorder = Recorder(driver)
    names = [driver.submit(prompt(50, s), max_tokens=2, prompt_logprobs=0) for s in range(2)]
    plain = driver.submit(prompt(60), max_tokens=1)
    driver.run()
    assert max((s.score_token_ids >= 0).sum() for s in recorder.samplings()) == 16
    for seed, name in enumerate(names):
        report = driver.events[name, 0][0].prompt_logprobs
        assert report is not None
        assert [e.chosen.token_id for e in report[1:] if e] == prompt(50, seed)[1:]
    assert driver.tokens(plain) == alone(prompt(60), max_tokens=1)


def test_scoring_survives_preemption_without_scoring_twice() -> None:
    driver = make_engine_driver(12, block_size=4, max_model_len=48, max_batched_tokens=8)
    names = [driver.submit(prompt(9, s), max_tokens=30, prompt_logprobs=0) for s in range(5)]
    driver.run()
    assert driver.engine.stats().preemptions_total > 0
    for seed, name in enumerate(names):
        report = driver.events[name, 0][0].prompt_logprobs
        assert report is not None
        assert [e.chosen.token_id for e in report[1:] if e] == prompt(9, seed)[1:]
    driver.assert_empty()


@pytest.mark.parametrize("length", [1, 16, 40])
def test_scoring_alone_generates_nothing(length: int) -> None:
    driver = make_engine_driver(max_batched_tokens=16)
    name = driver.submit(prompt(length), max_tokens=0, prompt_logprobs=1)
    driver.run()
    (event,) = driver.events[name, 0]
    assert event.finish_reason == "length"
    assert (event.token_ids, event.text) == ([], "")
    assert event.prompt_logprobs is not None and len(event.prompt_logprobs) == length
    assert event.usage is not None and event.usage.completion_tokens == 0
    driver.assert_empty()
