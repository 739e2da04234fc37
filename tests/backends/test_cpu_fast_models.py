"""Whole models on the CPU fast path: every architecture against the oracle, and what a batch may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.errors import ModelError
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.tiny_models import TINY_ARCHITECTURES
from headrace.types import EngineSettings, StepResult

TOKENS = np.random.default_rng(1).integers(4, 500, 120).tolist()
NUM_BLOCKS = 48
SCATTERED = np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()
Floats = NDArray[np.float32]
Make = Callable[..., FastRunner]


@pytest.fixture
def make(tiny_checkpoint: Callable[..., Path]) -> Iterator[Make]:
    """Return `make(architecture, num_threads)`, a runner with a pool; all are closed at the end."""
    made = []

    def make(architecture: str = "llama", num_threads: int = 2) -> FastRunner:
        model = open_checkpoint(tiny_checkpoint(architecture))
        settings = EngineSettings(num_threads=num_threads, max_model_len=256)
        made.append(FastRunner(model, SingleRank(), settings))
        made[-1].allocate(NUM_BLOCKS)
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def batch_of(runner: FastRunner, *steps: SequenceStep, **more: Any) -> Any:
    return forward_batch(steps, block_size=16, num_groups=len(runner.kv_groups()), **more)


def logits(runner: FastRunner, *steps: SequenceStep) -> Floats:
    runner.execute(batch_of(runner, *steps))
    return runner.last_logits()


def in_chunks(runner: FastRunner, sizes: Sequence[int]) -> Floats:
    """The logits behind every token of a sequence that is computed in chunks of `sizes`."""
    found, done = [], 0
    for size in sizes:
        step = SequenceStep(TOKENS[done : done + size], done, SCATTERED[:8], range(size))
        found.append(logits(runner, step))
        done += size
    return np.concatenate(found)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_architecture_is_near_the_oracle(
    architecture: str, num_threads: int, make: Make, tiny_checkpoint: Callable[..., Path]
) -> None:
    runner = make(architecture, num_threads)
    found = in_chunks(runner, [47, 1, 1, 38, 33])
    model = open_checkpoint(tiny_checkpoint(architecture))
    expected = ModelDriver(NumpyOps(), model).logits(TOKENS)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen2"])
def test_logits_depend_on_no_batch_no_chunk_and_no_thread(architecture: str, make: Make) -> None:
    alone = make(architecture, 1)
    expected = in_chunks(alone, [1] * 90)
    together = make(architecture, 2)
    np.testing.assert_array_equal(in_chunks(together, [90]), expected)
    others = [
        SequenceStep(TOKENS[i : i + 3 + i], 0, SCATTERED[8 + 2 * i : 10 + 2 * i], range(3 + i))
        for i in range(11)
    ]
    mine = SequenceStep(TOKENS[60:90], 60, SCATTERED[:8], range(30))
    mixed = logits(together, *others[:4], mine, *others[4:])
    before = sum(len(step.token_ids) for step in others[:4])
    np.testing.assert_array_equal(mixed[before : before + 30], expected[60:])


def test_copied_blocks_and_moved_rows_continue_alike(make: Make) -> None:
    runner = make("gemma3_text")
    logits(runner, SequenceStep(TOKENS[:40], 0, [3, 9, 4]))
    runner.copy_blocks([(3, 20), (9, 21), (4, 22)])
    for layer in (0, 1):
        slots = [block * 16 + row for block in (3, 9, 4) for row in range(16)]
        keys, values = runner.read_rows(layer, slots)
        assert keys.shape == values.shape == (48, 2, 16) and np.abs(keys[:40]).min() > 0
        moved = [block * 16 + row for block in (30, 31, 32) for row in range(16)]
        runner.write_rows(layer, moved, keys, values)
    following = [SequenceStep([7], 40, table) for table in ([3, 9, 4], [20, 21, 22], [30, 31, 32])]
    first, second, third = logits(runner, *following)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


def test_rows_written_are_the_rows_read(make: Make) -> None:
    runner = make()
    random = np.random.default_rng(0)
    keys, values = random.integers(-99, 99, (2, 5, 2, 16)).astype(np.float32)
    runner.write_rows(1, [17, 3, 200, 31, 16], keys, values)
    again = runner.read_rows(1, [31, 17, 3])
    np.testing.assert_array_equal(again[0], keys[[3, 0, 1]])
    np.testing.assert_array_equal(again[1], values[[3, 0, 1]])


def run(runner: FastRunner, batch: Any) -> StepResult:
    handle = runner.execute(batch)
    handle.sample()
    return handle.result()


def test_a_token_may_come_from_the_step_before(make: Make) -> None:
    runner = make()
    prompts = (SequenceStep(TOKENS[:20], 0, [4, 2]), SequenceStep(TOKENS[:7], 0, [7]))
    drawn = run(runner, batch_of(runner, *prompts)).token_ids
    told = [SequenceStep([int(drawn[1])], 7, [7]), SequenceStep([int(drawn[0])], 20, [4, 2])]
    expected = run(runner, batch_of(runner, *told)).token_ids.tolist()
    run(runner, batch_of(runner, *prompts))
    unknown = [SequenceStep([0], 7, [7]), SequenceStep([0], 20, [4, 2])]
    found = run(runner, batch_of(runner, *unknown, token_sources=[1, 0]))
    assert found.token_ids.tolist() == expected


def test_draws_scores_and_log_probabilities(make: Make) -> None:
    runner = make()
    columns: dict[str, Sequence[float]] = {
        "temperature": [0.0, 30.0, 30.0, 0.0],
        "seeds": [0.0, 3, 3, 0],
        "num_logprobs": [3, -1, -1, 0],
        "score_token_ids": [-1, -1, -1, 11],
    }
    step = SequenceStep(TOKENS[:20], 0, [1, 5], [19, 19, 19, 18])
    result = run(runner, batch_of(runner, step, sampling=sampling_batch(4, columns)))
    row = runner.last_logits()[0]
    best = np.argsort(-row, kind="stable")[:3].tolist()
    assert result.top_token_ids is not None and result.logprobs is not None
    assert result.top_token_ids[0].tolist() == best and result.token_ids[0] == best[0]
    assert result.token_ids[1] == result.token_ids[2] and result.token_ids[3] == 11
    exact = row.astype(np.float64)
    total = np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    np.testing.assert_allclose(result.logprobs[0], exact[best[0]] - total, atol=1e-4)


def test_threads_that_share_a_draw_draw_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make("qwen2", 2)
    columns = {"temperature": [20.0] * 9, "seeds": range(9), "num_logprobs": [2] * 9}
    step = SequenceStep(TOKENS[:20], 0, [1, 5], range(5, 14))
    batch = batch_of(runner, step, sampling=sampling_batch(9, columns))
    alone = run(runner, batch)
    monkeypatch.setattr("headrace.backends.cpu.fast.sampling.SHARED_LOGITS", 1)
    shared = run(runner, batch)
    assert len(set(alone.token_ids.tolist())) > 3
    np.testing.assert_array_equal(shared.token_ids, alone.token_ids)
    np.testing.assert_array_equal(shared.top_logprobs, alone.top_logprobs)


def test_memory_of_a_rare_large_step_is_given_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.backends.cpu.fast.step_memory._KEPT_BYTES", 0)
    runner = make()
    few = logits(runner, SequenceStep(TOKENS[:100], 0, SCATTERED[:8]))
    many = logits(runner, SequenceStep(TOKENS[:100], 0, SCATTERED[:8], [*range(100)] * 30))
    assert len(many) == 3000
    np.testing.assert_array_equal(logits(runner, SequenceStep(TOKENS[:100], 0, SCATTERED[:8])), few)
    np.testing.assert_array_equal(many[99], few[0])


def test_a_step_without_sample_rows_gives_an_empty_result(make: Make) -> None:
    runner = make()
    step = SequenceStep(TOKENS[:20], 0, [1, 5], sample_offsets=())
    assert run(runner, batch_of(runner, step)).token_ids.shape == (0,)


def test_warm_up_and_memory(make: Make) -> None:
    runner = make("gemma3_text")
    report = runner.memory()
    # 2 layers of keys and values, 16 rows of 2 heads of 16 numbers of 2 bytes.
    assert report.kv_bytes_per_block == 2 * 2 * 16 * 2 * 16 * 2
    assert report.kv_pool_bytes == NUM_BLOCKS * report.kv_bytes_per_block
    fractions: list[float] = []
    runner.warm_up(fractions.append)
    assert fractions[0] == 0.0 and fractions[-1] == 1.0 and fractions == sorted(fractions)


def test_closing_twice_is_closing_once(make: Make) -> None:
    runner = make()
    runner.close()
    runner.close()
    with pytest.raises(AssertionError, match="closed"):
        runner.execute(batch_of(runner, SequenceStep([1], 0, [0])))


class Policy:
    """A quantization policy that wants every matrix in int4."""

    name: ClassVar[str] = "wants"

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        return "int4"

    def quantize(self, weight: Any, scheme: str, statistics: Any) -> dict[str, Any]:
        raise AssertionError("nothing is quantized here")


def test_a_quantization_that_cannot_be_made_is_refused(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model: LoadedModel = open_checkpoint(tiny_checkpoint())
    with pytest.raises(ModelError, match="'wants' wants tensor"):
        FastRunner(model, SingleRank(), EngineSettings(), quantization=Policy())
