"""Weights as declarations: stacking, the share of a rank, and tensors that are not as declared."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.group import SingleRank
from headrace.interfaces import LoadSettings
from headrace.models.weights import (
    MAX_PART_ELEMENTS,
    LinearDeclaration,
    VectorDeclaration,
    WeightLoader,
)
from headrace.testing.model_driver import ModelDriver, open_checkpoint
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.tiny_models import TINY_ARCHITECTURES, write_tiny_checkpoint
from headrace.types import WeightPart

PLAIN = frozenset({"f32", "f16", "bf16"})
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Tensors:
    """A TensorSource over arrays; a name in `blocks` is stored in a scheme of one byte per number."""

    arrays: Mapping[str, Array]
    blocks: frozenset[str] = frozenset()

    def names(self) -> Iterable[str]:
        return self.arrays

    def has(self, name: str) -> bool:
        return name in self.arrays

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "bytes" if name in self.blocks else "f32", self.arrays[name].shape

    def read(self, name: str) -> WeightPart:
        scheme, shape = self.scheme(name)
        values = self.arrays[name]
        data = values.astype(np.uint8) if scheme == "bytes" else values.astype(np.float32)
        return WeightPart(name, scheme, shape, data)


@dataclass(slots=True)
class Expand:
    """Turns the scheme of one byte per number into f32, and remembers the shapes it saw."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, part: WeightPart) -> WeightPart:
        if part.scheme in PLAIN:
            return part
        assert part.data.shape == part.shape
        self.shapes.append(part.shape)
        return WeightPart(part.name, "f32", part.shape, part.data.astype(np.float32))


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank with nobody to sum with: for loading only."""

    rank: int
    size: int

    def all_reduce(self, x: Any) -> Any:
        raise AssertionError("loading sums nothing")


def loader(tensors: Tensors, expand: Expand | None = None, rank: Any = None) -> WeightLoader:
    settings = LoadSettings(max_positions=8, expand=expand or Expand(), schemes=PLAIN)
    return WeightLoader(NumpyOps(), tensors, rank or SingleRank(), settings, 1)


def counting(rows: int, columns: int, start: int = 0) -> Array:
    return (np.arange(rows * columns).reshape(rows, columns) + start) % 251


def qkv_tensors() -> Tensors:
    return Tensors(
        {
            "q.weight": counting(8, 4),
            "k.weight": counting(4, 4, 50),
            "q.bias": np.arange(8.0),
            "k.bias": np.arange(4.0) + 50,
            "o.weight": counting(3, 8),
            "o.bias": np.arange(3.0),
        }
    )


def test_stacked_matrices_and_their_biases_keep_their_order() -> None:
    held = loader(qkv_tensors()).hold(LinearDeclaration(("q", "k"), (8, 4), 4, "out", True))
    np.testing.assert_array_equal(held.rows, np.vstack([counting(8, 4), counting(4, 4, 50)]))
    np.testing.assert_array_equal(held.bias, [*range(8), *range(50, 54)])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_split_of_out_takes_a_share_of_every_stacked_matrix(rank: int) -> None:
    held = loader(qkv_tensors(), rank=Rank(rank, 2)).hold(
        LinearDeclaration(("q", "k"), (8, 4), 4, "out", True)
    )
    q, k = slice(rank * 4, rank * 4 + 4), slice(rank * 2, rank * 2 + 2)
    expected = np.vstack([counting(8, 4)[q], counting(4, 4, 50)[k]])
    np.testing.assert_array_equal(held.rows, expected)
    np.testing.assert_array_equal(held.bias, [*range(8)[q], *range(50, 54)[k]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_split_of_in_takes_columns_and_adds_the_bias_once(rank: int) -> None:
    held = loader(qkv_tensors(), rank=Rank(rank, 2)).hold(
        LinearDeclaration(("o",), (3,), 8, "in", True)
    )
    np.testing.assert_array_equal(held.rows, counting(3, 8)[:, rank * 4 : rank * 4 + 4])
    assert (held.bias is None) == (rank == 1)


@pytest.mark.parametrize("split", ["out", "in"])
def test_blocks_are_expanded_before_their_columns_are_shared(split: Any) -> None:
    tensors = Tensors({"o.weight": counting(6, 8)}, frozenset({"o.weight"}))
    expand = Expand()
    held = loader(tensors, expand, Rank(1, 2)).hold(LinearDeclaration(("o",), (6,), 8, split))
    expected = counting(6, 8)[3:] if split == "out" else counting(6, 8)[:, 4:]
    np.testing.assert_array_equal(held.rows, expected)
    assert expand.shapes == [(3, 8)] if split == "out" else [(6, 8)]


def test_large_blocks_arrive_in_pieces_and_plain_tensors_in_one() -> None:
    columns = MAX_PART_ELEMENTS // 2
    tensors = Tensors({"e.weight": counting(5, columns)}, frozenset({"e.weight"}))
    expand = Expand()
    held = loader(tensors, expand).hold(LinearDeclaration(("e",), (5,), columns))
    assert expand.shapes == [(2, columns), (2, columns), (1, columns)]
    np.testing.assert_array_equal(held.rows, counting(5, columns))
    plain = Tensors({"e.weight": counting(5, 4)})
    taken: list[WeightPart] = []

    class Recorder(NumpyOps):
        def hold(self, parts: Any, bias: Any = None) -> Any:
            taken.extend(parts)

    settings = LoadSettings(max_positions=8, expand=Expand(), schemes=PLAIN)
    WeightLoader(Recorder(), plain, SingleRank(), settings, 1).hold(
        LinearDeclaration(("e",), (5,), 4)
    )
    assert [part.shape for part in taken] == [(5, 4)]


def test_a_missing_or_misshapen_tensor_is_named_with_both_shapes() -> None:
    tensors = Tensors({"a.weight": counting(2, 4), "n": np.ones(5)})
    with pytest.raises(ModelError, match=r"no tensor 'b\.weight' \[2, 4\]"):
        loader(tensors).hold(LinearDeclaration(("b",), (2,), 4))
    with pytest.raises(ModelError, match=r"'a\.weight' is \[2, 4\] .* asks for \[4, 2\]"):
        loader(tensors).hold(LinearDeclaration(("a",), (4,), 2))
    with pytest.raises(ModelError, match=r"'n' is \[5\] .* asks for \[6\]"):
        loader(tensors).hold(VectorDeclaration("n", 6))


def test_a_share_that_does_not_come_out_even_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'o\.weight' has 8 .* 3 ranks"):
        loader(qkv_tensors(), rank=Rank(0, 3)).hold(LinearDeclaration(("o",), (3,), 8, "in"))


def test_progress_only_grows_and_ends_at_one(tmp_path: Path) -> None:
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, "gemma3_text"))
    fractions: list[float] = []
    settings = LoadSettings(
        max_positions=64, expand=model.expand, schemes=PLAIN, report=fractions.append
    )
    model.architecture.load(NumpyOps(), model.tensors, SingleRank(), settings)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 10


class ThreadRank:
    """One of several ranks in threads of this process, summing over a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._slots = slots

    def all_reduce(self, x: Any) -> Any:
        self._slots[self.rank] = x
        self._barrier.wait(timeout=30)
        total = sum(self._slots)
        self._barrier.wait(timeout=30)
        return total


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    overrides = {"attention_bias": True} if name in ("llama", "qwen3") else {}
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, name, config=overrides))
    token_ids = np.random.default_rng(2).integers(0, model.architecture.vocab_size, 40).tolist()
    alone = ModelDriver(NumpyOps(), model).logits(token_ids)
    barrier, slots = threading.Barrier(2), [None, None]

    def run(rank: int) -> Array:
        group = ThreadRank(rank, 2, barrier, slots)
        return ModelDriver(NumpyOps(), model, group=group).logits(token_ids, [23, 17])

    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, range(2)):
            np.testing.assert_allclose(logits, alone, atol=1e-9)


def test_heads_that_do_not_divide_over_the_ranks_are_refused(tmp_path: Path) -> None:
    model = open_checkpoint(write_tiny_checkpoint(tmp_path, "llama"))
    settings = LoadSettings(max_positions=8, expand=model.expand, schemes=PLAIN)
    with pytest.raises(ModelError, match="4 query and 2 key/value heads do not divide over 4"):
        model.architecture.load(NumpyOps(), model.tensors, Rank(0, 4), settings)
