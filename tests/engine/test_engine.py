"""The engine from outside: caching, choices and times."""

from __future__ import annotations

import random

import pytest

from headrace.testing.engine_driver import generate_alone as alone
from headrace.testing.engine_driver import make_engine_driver
from headrace.testing.engine_driver import random_prompt as prompt

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
    """C06: two hundred aborts, then the same prompts to their end."""
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
    """C07: twenty canaries, four at a time, more history than blocks."""
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
    """M05: unique prompts under tight memory hit nothing."""
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
    """P20: with and without the cache, in any number of slots."""
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
    one_by_one = make_engine_driver(max_num_sequences=1, prefix_caching=False)  # forks nothing
    name = one_by_one.submit(prompt(length), n=3, seed=7, temperature=1.0, max_tokens=24)
    one_by_one.run()
    assert runs == [[one_by_one.tokens(name, index) for index in range(3)]] * 2
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
    arrivals: dict[str, float] = {}
    first_seen: dict[tuple[str, int], float] = {}
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


def test_a_runner_that_cannot_prepare_is_not_asked_again() -> None:
    driver = make_engine_driver()
    calls: list[str] = []

    def prepare() -> bool:
        calls.append("asked")
        raise OSError("no such pages")

    driver.engine._prepare = prepare
    assert not driver.engine.prepare()
    assert not driver.engine.prepare()
    assert calls == ["asked"]
    driver.submit([1, 2, 3], max_tokens=2)
    driver.run()
    driver.assert_empty()
