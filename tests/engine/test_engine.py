"""The engine from outside: events, usage, timings, choices, failures, and what an abort leaves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.backends.simulated.runner import SimulatedStep
from headrace.errors import EngineFailed, InvalidRequest
from headrace.testing.engine_driver import EOS_TOKEN_ID, EngineDriver, make_engine_driver
from headrace.types import ForwardBatch, SamplingBatch, StepResult


def prompt(length: int, seed: int = 0) -> list[int]:
    choice = random.Random(f"{length} {seed}")
    return [choice.randrange(1, 300) for _ in range(length)]


def alone(tokens: list[int], **options: object) -> list[int]:
    return make_engine_driver(64, max_model_len=1024, prefix_caching=False).generate(
        tokens, **options
    )


class Recorder:
    """Keeps every batch that reaches the runner."""

    def __init__(self, driver: EngineDriver) -> None:
        self.batches: list[ForwardBatch] = []
        real = driver.runner.execute

        def execute(batch: ForwardBatch) -> SimulatedStep:
            self.batches.append(batch)
            return real(batch)

        driver.runner.execute = execute  # type: ignore[method-assign]

    def samplings(self) -> list[SamplingBatch]:
        return [batch.sampling for batch in self.batches]


# --- prefix cache --------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_cached_prompt_gives_what_an_uncached_one_gives(length: int) -> None:
    tokens = prompt(length)
    expected = alone(tokens, max_tokens=6, logprobs=2)
    driver = make_engine_driver()
    for time in range(3):
        name = driver.submit(tokens, max_tokens=6, logprobs=2)
        driver.run()
        assert driver.tokens(name) == expected
        usage = driver.last(name).usage
        assert usage is not None
        assert usage.cached_tokens == (0 if time == 0 else (length - 1) // 16 * 16)
        assert (usage.prompt_tokens, usage.completion_tokens) == (length, 6)
    twins = [driver.submit(tokens, max_tokens=6) for _ in range(2)]
    driver.run()
    assert [driver.tokens(name) for name in twins] == [expected] * 2
    driver.assert_empty()


def test_an_answer_is_cached_for_the_next_turn() -> None:
    driver = make_engine_driver()
    first = prompt(20)
    answer = driver.generate(first, max_tokens=30)
    name = driver.submit([*first, *answer, *prompt(5)], max_tokens=3)
    driver.run()
    assert driver.last(name).usage.cached_tokens == 48  # type: ignore[union-attr]
    assert driver.tokens(name) == alone([*first, *answer, *prompt(5)], max_tokens=3)


def test_requests_aborted_in_the_middle_of_their_prompt_leave_no_wrong_block() -> None:
    driver = make_engine_driver(24, max_batched_tokens=24)
    choice = random.Random(3)
    prompts = [prompt(100, seed) for seed in range(6)]
    for _ in range(200):
        name = driver.submit(choice.choice(prompts), max_tokens=4)
        for _ in range(choice.randrange(7)):
            driver.step()
        driver.engine.abort(name)
        if choice.random() < 0.2:
            driver.run()
    driver.run()
    driver.assert_empty()
    for tokens in prompts:
        assert driver.generate(tokens, max_tokens=8) == alone(tokens, max_tokens=8)


def test_conversations_on_a_small_pool_never_see_each_others_words() -> None:
    driver = make_engine_driver(24, max_num_sequences=4)
    histories = [[200 + number, *prompt(18, number)] for number in range(20)]
    for turn in range(4):
        names = []
        for number, history in enumerate(histories):
            history += prompt(6, 100 * turn + number)
            names.append(driver.submit(history, max_tokens=7))
        driver.run()
        for history, name in zip(histories, names, strict=True):
            answer = driver.tokens(name)
            assert answer == alone(history, max_tokens=7)
            history += answer
    driver.assert_empty()


def test_recomputation_after_preemption_is_no_hit() -> None:
    driver = make_engine_driver(12, block_size=4, max_model_len=48, max_batched_tokens=16)
    for seed in range(8):
        driver.submit(prompt(7, seed), max_tokens=36)
    driver.run()
    stats = driver.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_hit_tokens_total == 0
    assert stats.prefix_query_tokens_total == stats.prompt_tokens_total == 8 * 7
    assert stats.generation_tokens_total == 8 * 36


def test_salts_keep_equal_prompts_apart() -> None:
    driver = make_engine_driver()
    for salt, cached in (("a", 0), ("b", 0), ("a", 48), ("b", 48)):
        name = driver.submit(prompt(50), max_tokens=1, cache_salt=salt)
        driver.run()
        assert driver.last(name).usage.cached_tokens == cached  # type: ignore[union-attr]


# --- choices -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 20, 32])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_choices_differ_repeat_as_a_set_and_end_each_for_itself(length: int, slots: int) -> None:
    runs = []
    for prefix_caching in (True, False):
        driver = make_engine_driver(max_num_sequences=slots, prefix_caching=prefix_caching)
        name = driver.submit(prompt(length), n=3, seed=7, temperature=1.0, max_tokens=24)
        driver.run()
        runs.append([driver.tokens(name, index) for index in range(3)])
        for index in range(3):
            ends = [e.finish_reason for e in driver.events[name, index]]
            assert ends[-1] == "length"
            assert ends[:-1] == [None] * (len(ends) - 1)
        driver.assert_empty()
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_the_first_choice_of_many_is_the_only_one_of_one() -> None:
    driver = make_engine_driver()
    several = driver.submit(prompt(20), n=3, seed=7, temperature=1.0, max_tokens=9)
    driver.run()
    assert driver.generate(prompt(20), seed=7, temperature=1.0, max_tokens=9) == driver.tokens(
        several, 0
    )


def test_a_prompt_of_many_choices_is_computed_once_and_its_full_blocks_are_shared() -> None:
    driver = make_engine_driver(prefix_caching=False)
    driver.submit(prompt(40), n=4, temperature=1.0, max_tokens=10)
    driver.step()
    stats = driver.engine.stats()
    assert driver.runner.num_tokens == 40
    assert (stats.num_running, stats.num_waiting) == (4, 0)
    assert stats.num_blocks - stats.num_free_blocks == 2 + 4
    driver.run()
    driver.assert_empty()


def test_choices_without_a_seed_differ() -> None:
    driver = make_engine_driver()
    name = driver.submit(prompt(5), n=2, temperature=1.0, max_tokens=12)
    driver.run()
    assert driver.tokens(name, 0) != driver.tokens(name, 1)


def test_aborting_a_request_ends_all_its_choices_at_any_stage() -> None:
    for steps in range(8):
        driver = make_engine_driver(max_num_sequences=2, max_batched_tokens=16)
        name = driver.submit(prompt(40), n=4, max_tokens=20)
        for _ in range(steps):
            driver.step()
        assert driver.engine.abort(name)
        driver.assert_empty()


# --- time ----------------------------------------------------------------------------


def test_timings_are_those_of_the_injected_clock() -> None:
    driver = make_engine_driver(max_num_sequences=1)
    driver.submit(prompt(16), max_tokens=3)
    late = driver.submit(prompt(32), max_tokens=4)
    driver.run()
    timings = driver.last(late).timings
    assert timings is not None
    first = 0.001 + 16e-4 + 1e-4 + 16e-7 + 2 * (0.001 + 1e-4) + (17 + 18) * 1e-7
    prefill = 0.001 + 32e-4 + 1e-4 + 32e-7
    assert timings.queue_seconds == pytest.approx(first)
    assert timings.prefill_seconds == pytest.approx(prefill)
    assert timings.ttft_seconds == pytest.approx(first + prefill)
    assert timings.decode_seconds == pytest.approx(3 * (0.001 + 1e-4) + (33 + 34 + 35) * 1e-7)
    assert driver.clock.now() == pytest.approx(driver.engine.stats().step_seconds_total)


def test_every_choice_reports_its_times_once_and_a_first_token_stays_the_first() -> None:
    driver = make_engine_driver(14, block_size=4, max_model_len=48, max_batched_tokens=16)
    arrivals, first_seen = {}, {}
    for seed in range(30):
        name = driver.submit(prompt(4 + seed % 9, seed), max_tokens=24, n=1 + seed % 2)
        arrivals[name] = driver.clock.now()
        for event in driver.step():
            first_seen.setdefault((event.request_id, event.index), driver.clock.now())
    while driver.engine.has_work():
        for event in driver.step():
            first_seen.setdefault((event.request_id, event.index), driver.clock.now())
    assert driver.engine.stats().preemptions_total > 0
    for (name, index), events in driver.events.items():
        with_times = [event for event in events if event.timings is not None]
        assert with_times == events[-1:]
        ttft = with_times[0].timings.ttft_seconds  # type: ignore[union-attr]
        assert ttft is not None
        # text may be held back, so the first event is no earlier than the first token
        assert 0 < ttft <= first_seen[name, index] - arrivals[name] + 1e-9


# --- what the sampler is asked -------------------------------------------------------


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


# --- scoring the prompt --------------------------------------------------------------


def test_prompt_logprobs_cover_every_token_but_the_first_whatever_the_chunks() -> None:
    tokens = prompt(50)
    reports = []
    for budget in (512, 16, 7):
        driver = make_engine_driver(max_batched_tokens=budget)
        driver.generate(tokens, max_tokens=1)  # a filled cache must not hide rows
        name = driver.submit(tokens, max_tokens=3, prompt_logprobs=2, n=2)
        driver.run()
        for index in range(2):
            first, *others = driver.events[name, index]
            assert all(event.prompt_logprobs is None for event in others)
            reports.append(first.prompt_logprobs)
        assert driver.last(name).usage.cached_tokens == 0  # type: ignore[union-attr]
        driver.assert_empty()
    assert all(report == reports[0] for report in reports)
    assert reports[0][0] is None
    assert [entry.chosen.token_id for entry in reports[0][1:]] == tokens[1:]
    assert {len(entry.top) for entry in reports[0][1:]} == {2}


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


# --- failures ------------------------------------------------------------------------


class Failing:
    """Makes the draws of steps go wrong where a condition on the batch holds."""

    def __init__(self, driver: EngineDriver) -> None:
        self.poisoned: int | None = None
        self.raises = False
        real = driver.runner.execute

        def execute(batch: ForwardBatch) -> SimulatedStep:
            if self.raises:
                raise RuntimeError("the device fell off /the/bus")
            step = real(batch)
            result = step.result

            def spoiled() -> StepResult:
                answer = result()
                if self.poisoned is not None:
                    rows = batch.token_ids[batch.sample_rows]
                    answer.failed[rows == self.poisoned] = True
                return answer

            step.result = spoiled  # type: ignore[method-assign]
            return step

        driver.runner.execute = execute  # type: ignore[method-assign]


def test_rows_that_are_no_numbers_end_only_their_own_sequence() -> None:
    driver = make_engine_driver()
    failing = Failing(driver)
    good = driver.submit(prompt(20), max_tokens=8)
    driver.step()
    failing.poisoned = 299
    bad = driver.submit([*prompt(40, 1), 299], max_tokens=8, n=2)
    driver.step()
    failing.poisoned = None
    driver.run()
    for index in range(2):
        (event,) = driver.events[bad, index]
        assert event.finish_reason == "error"
        assert event.error is not None and event.error.http_status == 500
        assert event.usage is not None and event.usage.completion_tokens == 0
    assert driver.tokens(good) == alone(prompt(20), max_tokens=8)
    again = driver.submit([*prompt(40, 1), 299], max_tokens=1)
    driver.run()
    assert driver.last(again).usage.cached_tokens == 0  # type: ignore[union-attr]
    driver.assert_empty()


def test_a_step_that_raises_ends_what_ran_and_keeps_what_waits() -> None:
    driver = make_engine_driver(max_num_sequences=2)
    failing = Failing(driver)
    running = [driver.submit(prompt(20, s), max_tokens=8, n=1 + s) for s in range(2)]
    waiting = driver.submit(prompt(30), max_tokens=8)
    driver.step()
    failing.raises = True
    driver.step()
    failing.raises = False
    for name, index in ((running[0], 0), (running[1], 0)):
        event = driver.last(name, index)
        assert event.finish_reason == "error"
        assert event.error is not None and event.error.code == "engine_failed"
        assert "/the/bus" not in event.error.message
    driver.run()
    assert driver.tokens(waiting) == alone(prompt(30), max_tokens=8)
    assert driver.last(running[1], 1).finish_reason == "length"
    driver.assert_empty()
    assert driver.generate(prompt(20), max_tokens=8) == alone(prompt(20), max_tokens=8)


def test_a_device_that_is_lost_is_reported() -> None:
    driver = make_engine_driver()
    failing = Failing(driver)
    failing.raises = True
    for seed in range(2):
        driver.submit(prompt(20, seed), max_tokens=8)
        driver.step()
    driver.submit(prompt(20), max_tokens=8)
    with pytest.raises(EngineFailed, match="3 steps in a row"):
        driver.step()


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [5000]},
        {"stop_token_ids": (5000,)},
        {"logit_bias": {5000: 1.0}},
        {"grammar": "root ::= x"},
    ],
)
def test_what_cannot_be_served_is_refused_and_harms_nobody(bad: dict[str, object]) -> None:
    driver = make_engine_driver()
    beside = driver.submit(prompt(20), max_tokens=8)
    driver.step()
    options = dict(bad)
    tokens = options.pop("prompt", [1, 2, 3])
    with pytest.raises(InvalidRequest):
        driver.submit(tokens, max_tokens=2, **options)  # type: ignore[arg-type]
    driver.run()
    assert driver.tokens(beside) == alone(prompt(20), max_tokens=8)
    driver.assert_empty()


def test_closing_drops_requests_and_the_runner_and_takes_no_more() -> None:
    driver = make_engine_driver()
    driver.submit(prompt(20), max_tokens=8)
    driver.step()
    driver.engine.close()
    driver.engine.close()
    driver.assert_empty()
    with pytest.raises(Exception, match="stopping"):
        driver.submit(prompt(20), max_tokens=8)
