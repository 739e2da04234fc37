"""The built-in quantization policies: what they choose, how close they come, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backends.cpu.fast.runner import FastRunner
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.quantized import assemble, quantized
from headrace.backends.runner import OpsRunner
from headrace.errors import ModelError, PluginError
from headrace.group import SingleRank
from headrace.interfaces import LoadedModel, QuantizedPart
from headrace.models.dequantize import to_float32
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.policies.quantization.integers import Int4, Int8
from headrace.policies.quantization.mixed import Mixed
from headrace.testing.model_driver import open_checkpoint
from headrace.testing.small_models import PartSource, plain_part
from headrace.types import EngineSettings

RANDOM = np.random.default_rng(11)
REGISTRIES = Registries.from_manager(create_plugin_manager(discover=False))
EMBEDDING, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


def create(name: str, **options: Any) -> Any:
    return REGISTRIES.create("quantization", name, options)


def restored(policy: Any, weight: NDArray[np.float32], scheme: str) -> NDArray[np.float32]:
    return to_float32(scheme, assemble(policy, weight, scheme, "w"), weight.shape)


def lost(policy: Any, weight: NDArray[np.float32], scheme: str) -> float:
    error = restored(policy, weight, scheme) - weight
    return float(np.sqrt((error**2).sum() / (weight**2).sum()))


@pytest.mark.parametrize(
    ("name", "scheme", "group_size", "most"),
    [
        ("int8", "q8_0", 32, 0.006),
        ("int8", "q8_0", 64, 0.007),
        ("int8", "q8_0", -1, 0.009),
        ("int4", "q4_1", 32, 0.074),
        ("int4", "q4_1", 192, 0.11),
        ("int4", "q4_1", -1, 0.12),
    ],
)
@pytest.mark.parametrize("width", [576, 192])
def test_what_normal_numbers_lose(
    name: str, scheme: str, group_size: int, most: float, width: int
) -> None:
    """Q02: a group of -1 is a whole row. Q03: rows of 576, which no block of 256 fits."""
    weight = RANDOM.standard_normal((40, width)).astype(np.float32)
    policy = create(name, group_size=group_size)
    assert policy.scheme_for("w", weight.shape, "bf16") == scheme
    assert most / 3 < lost(policy, weight, scheme) < most


def test_extremes_survive() -> None:
    """Zeros stay zeros, one outlier keeps its place, numbers too small or large for f16 scales stay finite."""
    weight = np.zeros((5, 64), np.float32)
    weight[1, 3], weight[2], weight[3] = 7.5, 1e-30, 3e38
    weight[4, :32] = 2.0
    for policy, scheme in ((Int8(), "q8_0"), (Int4(), "q4_1")):
        found = restored(policy, weight, scheme)
        assert np.isfinite(found).all()
        assert (found[0] == 0).all() and np.abs(found[2]).max() < 1e-6
        np.testing.assert_allclose(found[1], weight[1], atol=0.02)
        np.testing.assert_allclose(found[4], weight[4], atol=0.01)


def test_what_is_already_quantized_or_no_matrix_stays() -> None:
    for policy in (Int8(), Int4(), Mixed()):
        assert policy.scheme_for("w", (64, 64), "q4_k") is None
        assert policy.scheme_for("norm", (64,), "f32") is None


def test_the_first_pattern_that_matches_decides() -> None:
    policy = create("mixed", weights={"*.mlp.*": "none", "*layers.0.*": "int8", "*": "int4"})
    for name, scheme in (
        (DOWN, None),
        ("model.layers.0.self_attn.q_proj.weight", "q8_0"),
        ("model.layers.1.self_attn.q_proj.weight", "q4_1"),
    ):
        assert policy.scheme_for(name, (64, 64), "bf16") == scheme
    assert create("mixed", weights={"x": "int8"}).scheme_for(DOWN, (64, 64), "bf16") is None
    assert Mixed().scheme_for(EMBEDDING, (64, 64), "bf16") == "q8_0"
    assert Mixed().scheme_for(DOWN, (64, 64), "bf16") == "q4_1"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int4", {"group_size": 48}, "group_size must be a multiple of 32, or -1.*got 48"),
        ("int8", {"group_size": 0}, "got 0"),
        ("mixed", {"weights": {}}, "weights must name at least one pattern"),
        ("mixed", {"weights": {"*": "int5"}}, "one of int8, int4, none"),
    ],
)
def test_options_that_no_scheme_can_hold(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        create(name, **options)


def model_of(**weights: Any) -> LoadedModel:
    parts = {name: plain_part(name, np.asarray(value)) for name, value in weights.items()}
    nothing: Any = None
    return LoadedModel(
        name="m", revision="", architecture=nothing, tensors=PartSource(parts), text=nothing,
        default_sampling={}, stored_dtype="float32", expand=lambda part: part,
    )  # fmt: skip


def test_a_width_that_no_group_fits_is_refused_by_name() -> None:
    """Q03: rows of 172 are a multiple of no group."""
    model = model_of(good=np.ones((8, 64)), odd=np.ones((8, 172)))
    for policy in (Int8(), Int4(), create("mixed", weights={"*": "int4"})):
        with pytest.raises(ModelError, match=r"'odd' has rows of 172.*group of 32.*mixed"):
            quantized(model, policy)
    wide = create("int8", group_size=128)
    with pytest.raises(ModelError, match=r"'good' has rows of 64.*group of 128"):
        quantized(model, wide)
    kept = quantized(model, create("mixed", weights={"odd": "none", "*": "int4"}))
    assert kept.tensors.scheme("odd")[0] == "f32" and kept.tensors.scheme("good")[0] == "q4_1"


def test_large_matrices_are_converted_in_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = RANDOM.standard_normal((70, 64)).astype(np.float32)
    model = model_of(w=weight)
    whole = quantized(model, Int4()).tensors.read("w")
    monkeypatch.setattr("headrace.backends.quantized.MAX_ELEMENTS", 64 * 16)
    in_runs = quantized(model, Int4()).tensors.read("w")
    assert (in_runs.scheme, in_runs.shape) == ("q4_1", (70, 64))
    np.testing.assert_array_equal(whole.data, in_runs.data)


def test_a_broken_weight_is_named() -> None:
    weight = np.ones((8, 64), np.float32)
    weight[3, 3] = np.nan
    with pytest.raises(ModelError, match="'w' holds a NaN"):
        quantized(model_of(w=weight), Int8()).tensors.read("w")


class Author:
    """A policy whose parts a test chooses."""

    name: ClassVar[str] = "author"

    def __init__(self, make: Callable[[NDArray[np.float32]], Mapping[str, QuantizedPart]]) -> None:
        self._make = make

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        return "q8_0"

    def quantize(self, weight: Any, scheme: str, statistics: Any) -> Mapping[str, QuantizedPart]:
        return self._make(weight)


def _given(parts: dict[str, QuantizedPart], weight: Any) -> dict[str, QuantizedPart]:
    return parts


def test_transposed_parts_are_taken_and_wrong_ones_refused() -> None:
    weight = RANDOM.standard_normal((16, 64)).astype(np.float32)
    parts = dict(Int8().quantize(weight, "q8_0", None))
    turned = {name: QuantizedPart(part.array.T, 1, 0) for name, part in parts.items()}
    np.testing.assert_array_equal(
        assemble(Author(lambda _: turned), weight, "q8_0", "w"),
        assemble(Int8(), weight, "q8_0", "w"),
    )
    wrong: list[tuple[dict[str, QuantizedPart], str]] = [
        ({"codes": parts["codes"]}, "gave the parts codes; it must give codes, scale"),
        (parts | {"scale": replace(parts["scale"], out_axis=None)}, r"axes \(None, 1\)"),
        (parts | {"codes": QuantizedPart(np.zeros((16, 64)), 0, 1)}, "'codes' as float64"),
        (parts | {"scale": QuantizedPart(np.zeros((16, 1), "f2"), 0, 1)}, r"\[16, 1\]"),
    ]
    for changed, message in wrong:
        author = Author(partial(_given, changed))
        with pytest.raises(PluginError, match=message):
            assemble(author, weight, "q8_0", "w")


@pytest.mark.parametrize("name", ["int8", "int4", "mixed"])
def test_a_checkpoint_is_held_so_on_both_paths(
    name: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """The fast path takes the blocks as they are, the reference path their numbers."""
    model = open_checkpoint(tiny_checkpoint())
    settings = EngineSettings(max_model_len=64)
    plain = FastRunner(model, SingleRank(), settings)
    held = FastRunner(model, SingleRank(), settings, quantization=create(name))
    assert held.memory().weight_bytes < 0.62 * plain.memory().weight_bytes
    for runner in (plain, held):
        runner.close()
    reference = OpsRunner(
        CpuOps(settings), model, SingleRank(), settings, schemes=CpuOps.schemes,
        quantization=create(name),
    )  # fmt: skip
    assert reference.memory().weight_bytes > 0
    reference.close()
