"""A real forward gives the same answer however the engine cuts, caches, preempts and batches it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.runner import OpsRunner
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.testing.engine_driver import EngineDriver, drive_runner, driver_tokenizer
from headrace.testing.model_driver import open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.types import EngineSettings

MAX_TOKENS = 20
PROMPTS = [[1 + (7 * i * (k + 3) + k) % 90 for i in range(11 + 9 * k)] for k in range(5)]
SAMPLINGS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 7, "top_k": 20, "min_p": 0.02},
    {"presence_penalty": 1.0, "logit_bias": {40: 2.0}},
]
Make = Callable[..., EngineDriver]
Answer = tuple[list[int], list[float]]


def numpy_runner(model: LoadedModel, settings: EngineSettings) -> Runner:
    return OpsRunner(NumpyOps(), model, SingleRank(), settings, schemes=NumpyOps.schemes)


def cpu_runner(model: LoadedModel, settings: EngineSettings) -> Runner:
    from headrace.backends.cpu.backend import CpuBackend

    backend = CpuBackend.open(0, None, SystemClock())
    return backend.create_runner(model, SingleRank(), settings)


ENGINES = (
    "numpy gemma3_text",
    *(f"cpu {name}" for name in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")),
    "cpu gemma3_text bfloat16",
    "cpu llama int8",
)
"""Operations, model and, on the CPU's fast path, how keys and values are kept."""


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Make:
    """Return `make(num_blocks, **settings)`: an engine over a tiny model, some with sliding windows."""
    operations, model_type, *fast = request.param.split()
    model = open_checkpoint(tiny_checkpoint(model_type))
    new_runner = {"numpy": numpy_runner, "cpu": cpu_runner}[operations]
    dtypes = {"dtype": "float32", "kv_dtype": "float32"}
    if fast:
        dtypes = {"dtype": "bfloat16", "kv_dtype": fast[0]}

    def make(num_blocks: int = 64, **settings: Any) -> EngineDriver:
        table: dict[str, Any] = {"max_model_len": 96, "max_num_sequences": 8, "block_size": 8}
        if fast:  # whose blocks are twice as large
            table |= {"block_size": 16, "num_threads": 2}
            num_blocks //= 2
        table |= {"deterministic": True, **settings, **dtypes}
        full = EngineSettings(**table)
        runner = new_runner(model, full)
        assert fast == [] or type(runner).__name__ == "FastRunner"
        vocab_size = min(model.architecture.vocab_size, driver_tokenizer().vocab_size)
        return drive_runner(runner, full, num_blocks, vocab_size)

    return make


def answer(driver: EngineDriver, name: str, index: int = 0) -> Answer:
    events = driver.events[name, index]
    logprobs = [entry.chosen.logprob for e in events for entry in e.logprobs or []]
    return driver.tokens(name, index), logprobs


def run(driver: EngineDriver, which: range = range(len(PROMPTS))) -> list[Answer]:
    names = [driver.submit(PROMPTS[k], max_tokens=MAX_TOKENS, **SAMPLINGS[k]) for k in which]
    driver.run()
    driver.assert_empty()
    return [answer(driver, name) for name in names]


@pytest.fixture
def exact(request: pytest.FixtureRequest) -> bool:
    """Whether bits must agree: NumPy's products depend on the number of rows in their last ones."""
    return "cpu" in request.node.callspec.id


@pytest.fixture
def plain(make: Make, exact: bool) -> Callable[[list[Answer]], None]:
    """Return a check that answers equal those of each request alone, nothing cached or cut."""
    driver = make(prefix_caching=False)
    expected = [run(driver, range(k, k + 1))[0] for k in range(len(PROMPTS))]

    def check(answers: list[Answer]) -> None:
        for (tokens, logprobs), (right_tokens, right_logprobs) in zip(
            answers, expected, strict=True
        ):
            assert tokens == right_tokens
            assert logprobs == (
                right_logprobs if exact else pytest.approx(right_logprobs, abs=1e-6)
            )

    return check


def test_a_batch_of_all(make: Make, plain: Callable[[list[Answer]], None]) -> None:
    plain(run(make()))


@pytest.mark.parametrize("budget", [8, 13, 32])
def test_any_chunks(make: Make, plain: Callable[[list[Answer]], None], budget: int) -> None:
    plain(run(make(max_batched_tokens=budget)))


def test_cached(make: Make, plain: Callable[[list[Answer]], None]) -> None:
    """Q04: int8 rows found in the cache give the bits of rows just computed."""
    driver = make()
    run(driver)
    plain(run(driver))
    assert driver.engine.stats().prefix_hit_tokens_total > 0


LENGTHS = (1, 15, 16, 17, 31, 32, 33)


def test_prompts_around_the_block_size_sent_three_times(make: Make, exact: bool) -> None:
    """C04: cached text and first-token log probabilities are the uncached ones, twins at once included."""
    sampling: dict[str, Any] = {"max_tokens": 6, "logprobs": 2}
    prompts = [[1 + (5 * i + length) % 90 for i in range(length)] for length in LENGTHS]
    driver = make(block_size=16)
    for prompt in prompts:
        cold = make(block_size=16, prefix_caching=False)
        name = cold.submit(prompt, **sampling)
        cold.run()
        tokens, logprobs = answer(cold, name)
        names = []
        for copies in (1, 1, 1, 2):
            names += [driver.submit(prompt, **sampling) for _ in range(copies)]
            driver.run()
        for place, name in enumerate(names):
            found = answer(driver, name)
            assert found[0] == tokens, (len(prompt), place)
            assert found[1] == (logprobs if exact else pytest.approx(logprobs, abs=1e-6))
            usage = driver.last(name).usage
            assert usage is not None
            assert usage.cached_tokens == (0 if place == 0 else (len(prompt) - 1) // 16 * 16)
        driver.assert_empty()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_and_resumed(
    make: Make, plain: Callable[[list[Answer]], None], prefix_caching: bool
) -> None:
    """Q04: int8 rows written again after a preemption give the bits of those before."""
    driver = make(14, max_batched_tokens=16, prefix_caching=prefix_caching)
    plain(run(driver))
    assert driver.engine.stats().preemptions_total > 0


def test_choices_are_the_same_however_they_come_to_their_blocks(make: Make) -> None:
    expected = None
    for slots in (8, 2, 1):
        driver = make(max_num_sequences=slots)
        name = driver.submit(
            PROMPTS[1], n=3, seed=3, temperature=1.0, max_tokens=MAX_TOKENS, frequency_penalty=0.4
        )
        driver.run()
        found = [driver.tokens(name, index) for index in range(3)]
        expected = expected or found
        assert found == expected
        driver.assert_empty()


def test_prompt_logprobs_do_not_depend_on_chunks(make: Make, exact: bool) -> None:
    reports = []
    for budget in (64, 9):
        driver = make(max_batched_tokens=budget)
        name = driver.submit(PROMPTS[3], max_tokens=1, prompt_logprobs=1)
        driver.run()
        prompt_logprobs = driver.events[name, 0][0].prompt_logprobs
        assert prompt_logprobs is not None
        reports.append([entry.chosen.logprob for entry in prompt_logprobs if entry])
    assert reports[0] == (reports[1] if exact else pytest.approx(reports[1], abs=1e-6))


def test_without_determinism_greedy_text_is_still_the_same(make: Make) -> None:
    """Batched, cut, cached and preempted: logits differ in their last bits only, so texts do not."""
    greedy: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 1}

    def answers(driver: EngineDriver) -> list[Answer]:
        names = [driver.submit(prompt, **greedy) for prompt in PROMPTS]
        driver.run()
        return [answer(driver, name) for name in names]

    alone = []
    for prompt in PROMPTS:
        driver = make(prefix_caching=False)
        name = driver.submit(prompt, **greedy)
        driver.run()
        alone.append(answer(driver, name))
    cached = make(deterministic=False)
    answers(cached)
    small = make(14, deterministic=False, max_batched_tokens=16)
    for driver in (make(deterministic=False, max_batched_tokens=13), cached, small):
        for (tokens, logprobs), (right_tokens, right) in zip(answers(driver), alone, strict=True):
            assert tokens == right_tokens
            assert logprobs == pytest.approx(right, abs=1e-3)
    assert cached.engine.stats().prefix_hit_tokens_total > 0
    assert small.engine.stats().preemptions_total > 0
