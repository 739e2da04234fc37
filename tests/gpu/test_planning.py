"""What both GPU backends plan on the host: work lists, buckets, packed sampling, decode steps in place."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.cuda_cpp import cuda_kernels, needs_cuda_cpp
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.backends.gpu.buckets import bucket_of, buckets
from headrace.backends.gpu.graphs import DecodeStep, is_decode
from headrace.backends.gpu.ops import GpuOps
from headrace.backends.gpu.probe import probe_gpu
from headrace.backends.gpu.runner import GpuRunner
from headrace.backends.gpu.sampling_arguments import blocks_per_row, pack_sampling
from headrace.backends.gpu.work_list import plan_attention
from headrace.group import SingleRank
from headrace.testing.cuda_cpu.launcher import EmulatedDevice
from headrace.testing.model_driver import open_checkpoint
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import EngineSettings

SEQUENCES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=12)


@given(SEQUENCES, st.integers(1, 5), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 90)))
def test_pieces_cover_every_visible_row_once_and_fit_the_capacity(
    sequences: list[tuple[int, int]], tile_tokens: int, wanted: int, window: int | None
) -> None:
    counts = np.array([n for n, _ in sequences])
    lens = np.array([max(n, rows) for n, rows in sequences], np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    total = int(counts.sum())
    work = plan_attention(
        starts, lens, counts > 0, window=window, tile_tokens=tile_tokens, blocks_wanted=wanted,
        max_tokens=total + 2,
    )  # fmt: skip
    assert work.pieces.shape == (total + 2 + wanted, 8)
    merges = work.merges[: work.counts[1]]
    assert sorted(merges[:, 0]) == list(range(total))
    for token, first, count, place in merges:
        pieces = work.pieces[first : first + count]
        assert (pieces[:, 6] == np.arange(first, first + count)).all()
        sequence = int(np.searchsorted(starts, token, side="right")) - 1
        seen = lens[sequence] - (starts[sequence + 1] - token) + 1
        oldest = 0 if window is None else max(0, seen - window)
        assert (pieces[:, 0] == sequence).all() and (pieces[:, 1] + place == token).all()
        assert pieces[0, 4] <= oldest and pieces[-1, 5] >= seen
        assert (pieces[1:, 4] == pieces[:-1, 5]).all()
        assert (pieces[:, 3] - pieces[:, 2] + 1 + place == seen).all()


def test_more_tokens_than_the_work_list_holds_is_refused() -> None:
    with pytest.raises(
        ValueError, match="3 query tokens are planned, the work list has room for 2"
    ):
        plan_attention(
            np.array([0, 3]), np.array([3]), np.array([True]),
            window=None, tile_tokens=1, blocks_wanted=1, max_tokens=2,
        )  # fmt: skip


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_bucket_holds_its_step_and_wastes_little(count: int, most: int) -> None:
    bucket = bucket_of(count, most)
    if count > most:
        assert bucket is None
        return
    assert bucket is not None and count <= bucket <= min(most, max(2 * count, count + 7))
    assert bucket in buckets(most)


def test_sampling_says_which_passes_a_batch_needs() -> None:
    columns: dict[str, Any] = {"temperature": [0, 1], "top_k": [5, 99], "top_p": [0.5, 1]}
    packed = pack_sampling(sampling_batch(2, columns), None, 50)
    assert not packed.filters_by_count, "greedy rows and a top_k beyond the vocabulary cut nothing"
    assert not packed.filters_by_mass and not packed.adjusts and packed.most_logprobs == -1


def test_blocks_share_a_row_where_the_batch_is_small() -> None:
    assert blocks_per_row(1, 128_000, 132) == 32
    assert blocks_per_row(64, 128_000, 132) == 5
    assert blocks_per_row(300, 128_000, 132) == 1
    assert blocks_per_row(1, 1000, 132) == 1


class FakeDriver:
    """A driver with one card of a given compute capability, or none."""

    def __init__(self, count: int, major: int = 9, code: int = 0) -> None:
        self._count, self._major, self._code = count, major, code

    def cuInit(self, flags: int) -> int:
        return self._code

    def cuDeviceGetCount(self, count: Any) -> None:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count

    def cuDeviceGet(self, device: Any, index: int) -> None:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self._major if attribute == 75 else 0


def _no_driver() -> Any:
    raise OSError


@pytest.mark.parametrize(
    ("modules", "version", "driver", "reason"),
    [
        ({"no_such_gpu_module": "gpu-package"}, "2.13.0", FakeDriver(1), r"headrace\[cupy\]"),
        ({}, "2.13.0+cpu", FakeDriver(1), "built without CUDA"),
        ({}, "2.13.0", None, "libcuda.so.1 is not found"),
        ({}, "2.13.0", FakeDriver(1, code=100), "error 100"),
        ({}, "2.13.0", FakeDriver(0), "sees no GPU"),
        ({}, "2.13.0", FakeDriver(1, 7), "compute capability 7.0; the kernels need 8.0"),
        ({}, "2.13.0", FakeDriver(1, 9), ""),
    ],
)
def test_the_probe_says_what_is_missing(
    modules: dict[str, str], version: str, driver: Any, reason: str
) -> None:
    found = probe_gpu(
        modules, "cupy", load_driver=_no_driver if driver is None else lambda: driver,
        torch_version=lambda: version,
    )  # fmt: skip
    assert found.ok == (reason == "")
    assert re.search(reason, found.reason)
    assert (reason == "") == (found.reason == "")


@needs_cuda_cpp
@pytest.mark.kernels
def test_a_filled_decode_step_equals_the_step_itself(tmp_path: Path) -> None:
    """Three decodes in a bucket of four, twice, with a context that grew and one that ended."""
    size = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, "gemma3_text", config=size))
    settings = EngineSettings(
        dtype="float32", kv_dtype="float32", max_model_len=96, max_num_sequences=4
    )
    kernels, _ = cuda_kernels()
    ops = GpuOps(kernels, EmulatedDevice(), settings, "cupy_raw")
    runner = GpuRunner(ops, model, SingleRank(), settings)
    runner.allocate(24)
    prompts = [
        SequenceStep(list(range(n)), 0, [3 * i, 3 * i + 1]) for i, n in enumerate((5, 17, 1))
    ]
    handle = runner.execute(forward_batch(prompts, block_size=16, num_groups=2))
    handle.sample()
    drawn = handle.result().token_ids.copy()
    held = DecodeStep(ops, 4, 6)
    for lens in ((5, 17, 1), (18, 2)):
        tables = [[0, 1], [3, 4], [6, 7]][3 - len(lens) :]
        steps = [SequenceStep([7], n, table) for n, table in zip(lens, tables, strict=True)]
        sources = [2 - i for i in range(len(lens))]
        batch = forward_batch(steps, block_size=16, num_groups=2, token_sources=sources)
        assert is_decode(batch)
        held.fill(batch)
        assert held.step.token_ids[: len(lens)].tolist() == [drawn[row] for row in sources]
        expected = runner._forward(ops.plan_step(batch))
        got = held.run(runner._forward, len(lens))
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    runner.close()
