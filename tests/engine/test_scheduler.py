"""Who runs when: budgets, admission, preemption and priorities, through whole engines in virtual time."""

from __future__ import annotations

import functools
import random

import pytest

from headrace.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from headrace.policies.scheduling.priority import PriorityFirst
from headrace.testing.engine_driver import EngineDriver, make_engine_driver
from headrace.testing.engine_driver import generate_alone as alone
from headrace.testing.engine_driver import random_prompt as prompt


def test_a_prompt_larger_than_the_pool_is_refused_with_the_arithmetic_and_blocks_nobody() -> None:
    """K01: refused at once, with the real limit."""
    driver = make_engine_driver(8, max_model_len=4096)
    with pytest.raises(ContextLengthExceeded) as refusal:
        driver.submit(prompt(200), max_tokens=5)
    for number in ("200 tokens", "13 blocks", "128 tokens", "8 blocks"):
        assert number in str(refusal.value)
    names = [driver.submit(prompt(20, seed), max_tokens=5) for seed in range(5)]
    driver.run()
    assert [len(driver.tokens(name)) for name in names] == [5] * 5
    driver.assert_empty()


def test_the_longest_sequence_fits_the_pool_alone() -> None:
    driver = make_engine_driver(8, max_model_len=4096)
    assert driver.engine.max_model_len == 128
    name = driver.submit(prompt(100))
    driver.run()
    assert len(driver.tokens(name)) == 28
    assert driver.last(name).finish_reason == "length"
    with pytest.raises(ContextLengthExceeded):
        driver.submit(prompt(128))
    with pytest.raises(ContextLengthExceeded, match="at most 28"):
        driver.submit(prompt(100), max_tokens=29)
    driver.generate(prompt(127), max_tokens=1)
    driver.generate(prompt(128), max_tokens=0, prompt_logprobs=0)
    driver.assert_empty()


def test_two_requests_that_fit_only_one_at_a_time_both_finish() -> None:
    """K03: neither restarts for ever."""
    driver = make_engine_driver(20, max_model_len=320, prefix_caching=False, max_batched_tokens=64)
    names = [driver.submit(prompt(130, seed), max_tokens=62) for seed in range(2)]  # 12 blocks each
    driver.run()
    for seed, name in enumerate(names):
        assert driver.tokens(name) == alone(prompt(130, seed), max_tokens=62)
    assert driver.engine.stats().preemptions_total <= 2
    assert driver.runner.num_tokens < 3 * 2 * 192
    driver.assert_empty()


def test_many_growing_requests_on_a_tiny_pool_are_preempted_a_bounded_number_of_times() -> None:
    driver = make_engine_driver(
        12, block_size=4, max_model_len=48, prefix_caching=False, max_batched_tokens=16
    )
    names = [driver.submit(prompt(6, seed), max_tokens=40) for seed in range(6)]
    driver.run()
    for seed, name in enumerate(names):
        assert driver.tokens(name) == alone(prompt(6, seed), max_tokens=40)
    preemptions = [driver.last(name).timings.num_preemptions for name in names]  # type: ignore[union-attr]
    assert sum(preemptions) == driver.engine.stats().preemptions_total > 0
    assert max(preemptions) <= 4
    assert preemptions[0] == 0
    assert driver.runner.num_tokens < 3 * 6 * 46
    driver.assert_empty()


def first_token_time(driver: EngineDriver, name: str) -> float:
    while (name, 0) not in driver.events:
        driver.step()
    return driver.clock.now()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_request_of_higher_priority_takes_a_slot_from_a_lower_one(slots: int) -> None:
    """K04: the victim resumes with the text it would have had."""
    driver = make_engine_driver(
        128, max_model_len=1024, max_num_sequences=slots, policy=PriorityFirst()
    )
    low = [driver.submit(prompt(20, s), max_tokens=500, priority=5) for s in range(2)]
    for _ in range(30):
        driver.step()
    high = driver.submit(prompt(20, 9), max_tokens=5, priority=1)
    submitted = driver.clock.now()
    assert first_token_time(driver, high) - submitted < 0.05
    driver.run()
    assert driver.tokens(high) == alone(prompt(20, 9), max_tokens=5)
    for seed, name in enumerate(low):
        assert driver.tokens(name) == alone(prompt(20, seed), max_tokens=500)
    assert driver.engine.stats().preemptions_total == 1
    driver.assert_empty()


def test_a_request_of_higher_priority_takes_blocks_from_lower_ones() -> None:
    driver = make_engine_driver(16, block_size=4, max_model_len=64, policy=PriorityFirst())
    for seed in range(3):
        driver.submit(prompt(14, seed), max_tokens=30, priority=5)
    for _ in range(5):
        driver.step()
    high = driver.submit(prompt(30, 9), max_tokens=5, priority=1)
    submitted = driver.clock.now()
    assert first_token_time(driver, high) - submitted < 0.05
    driver.run()
    driver.assert_empty()


def test_first_come_first_served_takes_no_slot_back_whatever_the_priority() -> None:
    driver = make_engine_driver(64, max_num_sequences=1)
    driver.submit(prompt(20), max_tokens=50, priority=5)
    driver.step()
    driver.submit(prompt(20, 1), max_tokens=5, priority=1)
    driver.run()
    assert driver.engine.stats().preemptions_total == 0


def test_equal_priorities_do_not_take_each_others_slots() -> None:
    driver = make_engine_driver(64, max_num_sequences=1, policy=PriorityFirst())
    for seed in range(4):
        driver.submit(prompt(20, seed), max_tokens=20, priority=3)
    driver.run()
    assert driver.engine.stats().preemptions_total == 0


def test_urgent_arrivals_cannot_take_one_request_back_for_ever() -> None:
    driver = make_engine_driver(64, max_num_sequences=1, policy=PriorityFirst())
    low = driver.submit(prompt(20), max_tokens=30, priority=5)
    for number in range(20):
        for _ in range(4):
            driver.step()
        driver.submit(prompt(20, number), max_tokens=2, priority=1)
    driver.run()
    assert driver.last(low).timings.num_preemptions == 3  # type: ignore[union-attr]


def test_choices_of_mixed_priorities_on_a_tiny_pool_all_finish() -> None:
    """K07: n of 3, preempted by priority."""
    driver = make_engine_driver(
        12,
        block_size=4,
        max_model_len=48,
        max_num_sequences=4,
        max_batched_tokens=16,
        policy=PriorityFirst(),
    )
    names = []
    for number in range(6):
        names.append(
            driver.submit(
                prompt(5 + number, number),
                max_tokens=20,
                n=3,
                seed=number,
                temperature=1.0,
                priority=(number * 5) % 3,
            )
        )
        driver.step()
    driver.run()
    for number, name in enumerate(names):
        other = make_engine_driver()
        reference = other.submit(
            prompt(5 + number, number), max_tokens=20, n=3, seed=number, temperature=1.0
        )
        other.run()
        for index in range(3):
            assert driver.tokens(name, index) == other.tokens(reference, index)
    driver.assert_empty()


@pytest.mark.parametrize("seed", range(25))
def test_prompts_that_meet_the_chunk_size_beside_decodes(seed: int) -> None:
    """K08: five hundred random arrivals of lengths around the chunk of 32; each text equals its own alone."""
    choice = random.Random(seed)
    for _ in range(20):
        driver = make_engine_driver(
            40, max_batched_tokens=32, max_num_sequences=6, max_model_len=128
        )
        wanted = []
        for length in choice.sample([31, 32, 33, 64, 65, 1, 16, 17], 8):
            wanted.append((driver.submit(prompt(length), max_tokens=4), length))
            for _ in range(choice.randrange(4)):
                driver.step()
        driver.run()
        for name, length in wanted:
            assert driver.tokens(name) == first_four(length)
        driver.assert_empty()


@functools.cache
def first_four(length: int) -> list[int]:
    return alone(prompt(length), max_tokens=4)


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    """K11: a first token within a few chunks."""
    driver = make_engine_driver(400, max_model_len=4096, max_batched_tokens=256)
    driver.submit(prompt(4000), max_tokens=2)
    driver.step()
    short = driver.submit(prompt(10), max_tokens=2)
    for _ in range(2):
        driver.step()
    assert (short, 0) in driver.events
    driver.run()


def test_short_prompts_take_at_most_half_of_the_steps_from_a_long_one() -> None:
    driver = make_engine_driver(400, max_model_len=4096, max_batched_tokens=64, max_num_sequences=4)
    long = driver.submit(prompt(1000), max_tokens=1)
    number = 0
    while (long, 0) not in driver.events:
        driver.submit(prompt(12, number), max_tokens=1)
        driver.submit(prompt(12, number + 1000), max_tokens=1)
        number += 1
        driver.step()
        assert number < 2.2 * 1000 / 64
    driver.run()


def test_decodes_are_never_left_out_for_prompts() -> None:
    driver = make_engine_driver(200, max_model_len=1024, max_batched_tokens=32)
    decoding = driver.submit(prompt(20), max_tokens=60)
    driver.step()
    for seed in range(4):
        driver.submit(prompt(300, seed), max_tokens=1)
    for count in range(2, 30):
        driver.step()
        assert len(driver.tokens(decoding)) >= count - 4  # text may be held for half a character
    sequence = driver.engine._scheduler.running[0]
    assert sequence.num_output_tokens == 29
    driver.run()


def test_a_step_never_computes_more_than_its_budget() -> None:
    driver = make_engine_driver(100, max_batched_tokens=24, max_num_sequences=64)
    for seed in range(40):
        driver.submit(prompt(40, seed), max_tokens=10)
    driver.run()
    assert driver.runner.most_tokens == 24


def test_a_tpot_target_bounds_the_prompt_tokens_beside_decodes() -> None:
    driver = make_engine_driver(400, max_model_len=4096, max_batched_tokens=512)
    driver.generate(prompt(700), max_tokens=30)  # steps of all kinds, for the fit
    target = 0.010
    name = driver.submit(prompt(10), max_tokens=30, tpot_target_seconds=target)
    driver.step()
    driver.submit(prompt(3000), max_tokens=2)
    steps = []
    while (name, 0) not in driver.events or driver.last(name).finish_reason is None:
        before = driver.clock.now()
        driver.step()
        steps.append(driver.clock.now() - before)
    assert max(steps) < target * 1.1
    assert max(steps) > target * 0.5
    driver.run()


def test_more_waiting_than_allowed_is_unavailable_and_says_when_to_retry() -> None:
    driver = make_engine_driver(64, max_num_sequences=2, max_queued_requests=3)
    for seed in range(5):
        driver.submit(prompt(20, seed), max_tokens=5)
    with pytest.raises(Unavailable) as refusal:
        driver.submit(prompt(20), max_tokens=5)
    assert refusal.value.retry_after_seconds is not None
    assert refusal.value.retry_after_seconds >= 1
    driver.step()
    assert driver.engine.stats().num_waiting == 3
    assert not driver.engine.has_room(1)
    driver.run()
    driver.assert_empty()


def test_each_choice_counts_in_the_queue() -> None:
    driver = make_engine_driver(64, max_num_sequences=2, max_queued_requests=4)
    driver.submit(prompt(20), max_tokens=5, n=5)
    assert driver.engine.stats().num_waiting == 5
    assert driver.engine.has_room(1)
    with pytest.raises(Unavailable):
        driver.submit(prompt(20), max_tokens=5, n=2)
    with pytest.raises(InvalidRequest, match="n is 7"):
        driver.submit(prompt(20), max_tokens=5, n=7)
    driver.run()
    driver.assert_empty()


def test_an_id_that_is_running_is_refused_and_free_again_after_an_abort() -> None:
    driver = make_engine_driver()
    driver.submit(prompt(20), max_tokens=5, request_id="same")
    with pytest.raises(InvalidRequest, match="'same'"):
        driver.submit(prompt(20), max_tokens=5, request_id="same")
    driver.step()
    assert driver.engine.abort("same")
    assert not driver.engine.abort("same")
    driver.submit(prompt(20), max_tokens=5, request_id="same")
    driver.run()
    assert driver.last("same").usage.completion_tokens == 5  # type: ignore[union-attr]
    driver.assert_empty()
