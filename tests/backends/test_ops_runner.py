"""The Runner over the NumPy operations: what the engine may count on from every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.runner import OpsRunner
from headrace.backends.warm_up import warm_up_steps
from headrace.errors import ModelError
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, Runner
from headrace.testing.model_driver import open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import EngineSettings, ForwardBatch, StepResult

SETTINGS = EngineSettings(max_model_len=128, max_batched_tokens=64, max_num_sequences=8)
BLOCK = SETTINGS.block_size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "gemma3_text"))


def make_runner(model: LoadedModel, settings: EngineSettings = SETTINGS, **more: Any) -> OpsRunner:
    return OpsRunner(NumpyOps(), model, SingleRank(), settings, schemes=NumpyOps.schemes, **more)


@pytest.fixture
def runner(model: LoadedModel) -> Iterator[OpsRunner]:
    made = make_runner(model)
    made.allocate(12)
    yield made
    made.close()


def run(runner: Runner, batch: ForwardBatch) -> StepResult:
    handle = runner.execute(batch)
    handle.sample()
    return handle.result()


def batch_of(*steps: SequenceStep, **more: Any) -> ForwardBatch:
    return forward_batch(steps, block_size=BLOCK, num_groups=2, **more)


PROMPT = list(range(40, 60))


def test_memory_is_arithmetic(model: LoadedModel) -> None:
    made: Runner = make_runner(model)
    before = made.memory()
    # 2 layers of keys and values, 16 rows of 2 heads of 16 numbers of 8 bytes.
    assert before.kv_bytes_per_block == 2 * 2 * 16 * 2 * 16 * 8
    assert before.kv_pool_bytes == 0 and before.weight_bytes > 0
    made.allocate(5)
    assert made.memory().kv_pool_bytes == 5 * before.kv_bytes_per_block
    assert made.memory().weight_bytes == before.weight_bytes


def test_loading_is_reported(model: LoadedModel) -> None:
    reports: list[tuple[str, float]] = []
    make_runner(model, report=lambda stage, fraction: reports.append((stage, fraction)))
    assert {stage for stage, _ in reports} == {"load"} and reports[-1][1] == 1.0


@pytest.mark.parametrize(
    ("num_blocks", "changes"),
    [
        (12, {}),
        (1, {"max_num_sequences": 1}),
        (2, {"block_size": 1, "max_batched_tokens": 1}),
        (64, {"max_num_sequences": 64, "max_batched_tokens": 512}),
        (3, {"max_num_sequences": 64, "max_batched_tokens": 2}),
    ],
)
def test_warm_up_fits_any_pool_and_reports_to_the_end(
    model: LoadedModel, num_blocks: int, changes: dict[str, int]
) -> None:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    made = make_runner(model, settings)
    made.allocate(num_blocks)
    fractions: list[float] = []
    made.warm_up(fractions.append)
    assert fractions[0] == 0.0 and fractions[-1] == 1.0 and fractions == sorted(fractions)
    for batch, _ in warm_up_steps(settings, num_groups=2, num_blocks=num_blocks, vocab_size=515):
        assert len(batch.token_ids) <= settings.max_batched_tokens
        assert batch.slots.max() < num_blocks * settings.block_size


def test_warm_up_reaches_every_path_of_a_step() -> None:
    steps = warm_up_steps(SETTINGS, num_groups=1, num_blocks=12, vocab_size=515)
    batches = [batch for batch, _ in steps]
    drawing = [batch.sampling for batch in batches]
    assert any(len(b.sample_rows) == 0 for b in batches)
    assert any((b.token_sources >= 0).any() for b in batches)
    assert any(masks is not None for _, masks in steps)
    for off, name in [(0, "temperature"), (0, "top_k"), (1, "top_p"), (0, "min_p")]:
        assert any((getattr(s, name) != off).any() for s in drawing)
    for off, name in [(1, "repetition_penalty"), (-1, "num_logprobs"), (-1, "score_token_ids")]:
        assert any((getattr(s, name) != off).any() for s in drawing)
    assert any(len(s.bias_ids) and len(s.history_ids) for s in drawing)
    lengths = [np.diff(b.query_starts) for b in batches]
    assert any(len(set(per_sequence)) > 1 for per_sequence in lengths)


def test_warm_up_changes_no_answer(model: LoadedModel) -> None:
    cold, warm = make_runner(model), make_runner(model)
    cold.allocate(12)
    warm.allocate(12)
    warm.warm_up(lambda fraction: None)
    batch = batch_of(
        SequenceStep(PROMPT, 0, [0, 1]), sampling=sampling_batch(1, {"num_logprobs": [3]})
    )
    first, second = run(cold, batch), run(warm, batch)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)
    np.testing.assert_array_equal(first.top_token_ids, second.top_token_ids)


def test_a_token_may_come_from_the_step_before(runner: OpsRunner) -> None:
    drawn = run(
        runner,
        batch_of(SequenceStep(PROMPT, 0, [4, 2]), SequenceStep(PROMPT[:7], 0, [7])),
    ).token_ids
    told = batch_of(
        SequenceStep([int(drawn[1])], 7, [7]), SequenceStep([int(drawn[0])], 20, [4, 2])
    )
    expected = run(runner, told).token_ids.tolist()
    run(runner, batch_of(SequenceStep(PROMPT, 0, [4, 2]), SequenceStep(PROMPT[:7], 0, [7])))
    unknown = batch_of(
        SequenceStep([0], 7, [7]), SequenceStep([0], 20, [4, 2]), token_sources=[1, 0]
    )
    assert run(runner, unknown).token_ids.tolist() == expected


def test_one_row_may_be_drawn_several_times(runner: OpsRunner) -> None:
    columns = {"temperature": [50.0] * 3, "seeds": [1.0, 2, 1], "positions": [20.0] * 3}
    batch = batch_of(
        SequenceStep(PROMPT, 0, [1, 5], sample_offsets=[19, 19, 19]),
        sampling=sampling_batch(3, columns),
    )
    first, second, again = run(runner, batch).token_ids.tolist()
    assert first == again and first != second


def test_a_step_without_sample_rows_gives_an_empty_result(runner: OpsRunner) -> None:
    result = run(runner, batch_of(SequenceStep(PROMPT, 0, [1, 5], sample_offsets=())))
    assert result.token_ids.shape == (0,)


def test_every_prompt_token_can_be_scored(runner: OpsRunner) -> None:
    following = PROMPT[1:]
    sampling = sampling_batch(19, {"score_token_ids": following, "num_logprobs": [0] * 19})
    scored = run(runner, batch_of(SequenceStep(PROMPT, 0, [1, 5], range(19)), sampling=sampling))
    assert scored.token_ids.tolist() == following and scored.logprobs is not None
    assert (scored.logprobs < 0).all() and np.isfinite(scored.logprobs).all()


def test_a_copied_block_continues_like_its_source(runner: OpsRunner) -> None:
    run(runner, batch_of(SequenceStep(PROMPT, 0, [3, 4])))
    runner.copy_blocks([(3, 8), (4, 9)])
    columns = {"num_logprobs": [4, 4]}
    result = run(
        runner,
        batch_of(
            SequenceStep([7], 20, [3, 4]),
            SequenceStep([7], 20, [8, 9]),
            sampling=sampling_batch(2, columns),
        ),
    )
    assert result.top_logprobs is not None
    np.testing.assert_array_equal(result.top_logprobs[0], result.top_logprobs[1])


def test_rows_that_are_read_can_be_written_elsewhere(runner: OpsRunner) -> None:
    run(runner, batch_of(SequenceStep(PROMPT[:16], 0, [3])))
    for layer in (0, 1):
        keys, values = runner.read_rows(layer, range(3 * BLOCK, 4 * BLOCK))
        assert keys.shape == values.shape == (16, 2, 16) and keys.dtype == np.float32
        assert np.abs(keys).min() > 0
        runner.write_rows(layer, range(6 * BLOCK, 7 * BLOCK), keys, values)
    drawn = run(
        runner, batch_of(SequenceStep([7], 16, [3, 0]), SequenceStep([7], 16, [6, 1]))
    ).token_ids
    assert drawn[0] == drawn[1]


def test_closing_twice_is_closing_once(model: LoadedModel) -> None:
    made = make_runner(model)
    made.allocate(1)
    made.close()
    made.close()
    with pytest.raises(AssertionError, match="closed"):
        made.execute(batch_of(SequenceStep([1], 0, [0])))


class Policy:
    """A quantization policy that wants every matrix in one scheme."""

    name = "wants"

    def __init__(self, scheme: str | None) -> None:
        self.scheme = scheme
        self.asked: list[str] = []

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        assert len(shape) == 2 and stored_as == "f32"
        self.asked.append(tensor_name)
        return self.scheme

    def quantize(self, weight: Any, scheme: str, statistics: Any) -> dict[str, Any]:
        raise AssertionError("nothing is quantized here")


def test_a_quantization_that_cannot_be_made_is_refused_before_loading(model: LoadedModel) -> None:
    for scheme in (None, "f32"):
        policy = Policy(scheme)
        make_runner(model, quantization=policy)
        assert "model.layers.1.mlp.down_proj.weight" in policy.asked
    with pytest.raises(ModelError, match=r"'wants' wants tensor 'model\..*' in int4.*'none'"):
        make_runner(model, quantization=Policy("int4"))
