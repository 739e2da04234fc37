"""The roofline of an operation, and the work that its share is reckoned from."""

from __future__ import annotations

import importlib
import pathlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.types import KVGroupSpec, MemoryReport

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"
WINDOW = KVGroupSpec(name="window", layers=(1,), num_kv_heads=2, head_dim=32, sliding_window=8)
FULL = KVGroupSpec(name="full", layers=(0, 2), num_kv_heads=2, head_dim=32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernels")


def test_the_larger_of_bytes_and_arithmetic_bounds_an_operation(kernels: Any) -> None:
    machine = kernels.Machine(memory=10.0, cache=100.0, integer=40.0, attention=5.0)
    work = kernels.Work(memory_bytes=50.0, cache_bytes=10.0, multiplications=80.0)
    assert work.seconds(machine) == (5.0, "memory")
    work.multiplications = 240.0
    assert work.seconds(machine) == (6.0, "arithmetic")
    work.rate = "attention"
    assert work.seconds(machine) == (48.0, "arithmetic")


def memory_of(bytes_per_token: int, kv_dtype: str) -> MemoryReport:
    """What a runner says that keeps blocks of 16 tokens."""
    return MemoryReport(
        weight_bytes=0, kv_bytes_per_block=16 * bytes_per_token, kv_pool_bytes=0, available_bytes=0,
        kv_dtype=kv_dtype,
    )  # fmt: skip


def test_the_work_of_a_step_is_that_of_its_weights_and_visible_rows(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = SimpleNamespace(
        in_size=64, out_size=32, num_bytes=1000, runs=(SimpleNamespace(num_columns=2, form=0),)
    )
    head = SimpleNamespace(
        in_size=64, out_size=96, num_bytes=3000,
        runs=(SimpleNamespace(num_columns=2, form=0), SimpleNamespace(num_columns=4, form=0)),
    )  # fmt: skip
    model: Any = SimpleNamespace(architecture=SimpleNamespace(kv_groups=lambda: (FULL, WINDOW)))
    monkeypatch.setattr(kernels, "WIDE_IS_SHORT", False)
    narrow, half = (SimpleNamespace(num_wide=wide, groups=range(2)) for wide in (0, 1))
    products = [kernels.Product(product, False, narrow)] * 2 + [kernels.Product(head, True, half)]
    batch, per_token = kernels.decode(2, 0.0, 99), 3 * 2 * 32  # numbers in all layers
    memory = memory_of(per_token * 2 * 2, "")
    found = kernels.work_of(model, products, batch, memory)
    linear = found["linear 64 x 32"]
    # two products of 64 x 32 and the first third of the head, each for two rows
    assert linear.memory_bytes == 2 * 1000 + 1000
    assert linear.multiplications == (2 + 1.5) * 2 * 64 * 32
    assert found["linear 64 x 64"].memory_bytes == 2000
    rows = 2 * (2 * 100 + 8)  # two sequences; two layers see all, one its window
    assert found["attention"].memory_bytes == rows * 2 * 2 * 2 * 32
    assert found["attention"].multiplications == 2 * rows * 64
    found = kernels.work_of(model, products, batch, memory_of(per_token * 2, "int8"))
    assert found["attention"].memory_bytes == rows * 2 * 2 * 32
    assert found["attention"].multiplications == 2 * 2 * rows * 64, "two bytes of a query each"
    assert found["attention"].rate == "integer"


def test_calls_of_the_reference_path_are_timed_by_name_and_width(kernels: Any) -> None:
    class Ops:
        name = "ops"

        def linear(self, x: Any, weight: Any) -> Any:
            time.sleep(0.001)
            return x @ weight.T

        def add(self, x: Any, y: Any) -> Any:
            return x + y

    timed = kernels.TimedOps(Ops())
    x = np.ones((2, 4), np.float32)
    assert timed.linear(x, np.ones((3, 4), np.float32)).shape == (2, 3)
    timed.add(x, x)
    assert timed.name == "ops"
    assert set(timed.spent) == {"linear 4 x 3", "add"} and timed.spent["linear 4 x 3"] >= 0.001


def test_every_thread_takes_part_in_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    roofline = importlib.import_module("roofline")
    seen: list[int] = []
    assert roofline.best_seconds(seen.append, 3, rounds=2) >= 0
    assert sorted(seen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
