"""The KV pool of a GPU backend is sized by what its device has left, on a device that pretends its size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from gpu.cuda_cpp import cuda_kernels, needs_cuda_cpp

import headrace
from headrace.backends.cupy_raw.backend import CupyRawBackend
from headrace.backends.cupy_raw.launches import CudaKernels
from headrace.backends.gpu.device import Device
from headrace.backends.gpu.graphs import DecodeStep
from headrace.backends.gpu.memory import device_memory, largest_step
from headrace.backends.gpu.ops import GpuOps
from headrace.backends.gpu.runner import GpuRunner
from headrace.build import BuiltEngine, build_engine, settle_kv_memory
from headrace.config import load_config, replica_config
from headrace.errors import ConfigError, ModelError
from headrace.group import SingleRank
from headrace.interfaces import Availability, Clock
from headrace.testing.cuda_cpu.launcher import EmulatedDevice
from headrace.testing.cuda_cpu.memory import HeldMemory
from headrace.testing.model_driver import open_checkpoint
from headrace.types import DeviceMemory, EngineSettings, GenerationRequest, SamplingParams
from headrace.types.units import about_size

MIB = 1 << 20
ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_sequences": 2, "max_batched_tokens": 24,
}  # fmt: skip


class Recording(EmulatedDevice):
    """An emulated device that says it can record decode steps."""

    can_capture = True


# --- the arithmetic ------------------------------------------------------------


def memory_of(device: Device, **changed: Any) -> DeviceMemory:
    given: dict[str, Any] = {"weight_bytes": 30, "activation_bytes": 10, "graph_bytes": 0}
    given |= {"memory_share": 0.9, "num_replicas": 1}
    return device_memory(device, **given | changed)


def test_what_is_left_is_what_is_free_less_the_peak_and_the_part_kept_free() -> None:
    device = EmulatedDevice(memory_bytes=200)
    device.memory.held_bytes = 50  # the weights, and 20 that the driver or another process took
    memory = memory_of(device)
    assert (memory.total_bytes, memory.free_bytes, memory.kept_free_bytes) == (200, 150, 20)
    assert memory.most_kv_bytes == 150 - 10
    assert memory.kv_bytes == 150 - 10 - 20


def test_recorded_steps_take_theirs_too() -> None:
    memory = memory_of(EmulatedDevice(memory_bytes=200), graph_bytes=31)
    assert memory.graph_bytes == 31
    assert memory.most_kv_bytes == 200 - 10 - 31
    assert memory.kv_bytes == 200 - 30 - 10 - 31 - 20


def test_replicas_share_the_device_and_the_last_one_is_content_with_what_is_free() -> None:
    device = EmulatedDevice(memory_bytes=200)
    device.memory.held_bytes = 30
    assert memory_of(device, num_replicas=2).kv_bytes == 90 - 30 - 10
    device.memory.held_bytes = 30 + 90 + 25
    assert memory_of(device, num_replicas=2).kv_bytes == 55 - 10 - 20


def test_where_nothing_is_left_it_is_nothing_and_not_less() -> None:
    device = EmulatedDevice(memory_bytes=45)
    device.memory.held_bytes = 40
    memory = memory_of(device)
    assert (memory.kv_bytes, memory.most_kv_bytes) == (0, 0)


def test_a_given_size_may_take_what_auto_keeps_free_and_no_more() -> None:
    device = EmulatedDevice(memory_bytes=200)
    memory = memory_of(device)
    settings = EngineSettings(kv_memory_bytes=190)
    assert settle_kv_memory(settings, memory, 1).kv_memory_bytes == 190
    settings = EngineSettings(kv_memory_bytes=191)
    with pytest.raises(
        ConfigError, match=r"engine.kv_memory: 191 is more than the 190 .*device 200"
    ):
        settle_kv_memory(settings, memory, 1)
    assert settle_kv_memory(EngineSettings(kv_memory_bytes=0), memory, 1).kv_memory_bytes == 140


# --- the step that is measured -------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest", "counts"),
    [
        (24, 4, 64, [21, 1, 1, 1]),
        (100, 4, 64, [64, 34, 1, 1]),
        (1000, 3, 64, [64, 64, 64]),
        (5, 8, 64, [1, 1, 1, 1, 1]),
    ],
)
def test_the_largest_step_is_full_and_as_deep_as_can_be(
    tokens: int, sequences: int, longest: int, counts: list[int]
) -> None:
    settings = EngineSettings(
        max_batched_tokens=tokens, max_num_sequences=sequences, max_model_len=longest
    )
    batch = largest_step(settings, 2, 300)
    assert np.diff(batch.query_starts).tolist() == counts
    assert batch.kv_lens.tolist() == [[longest] * len(counts)] * 2
    assert batch.block_tables.shape == (2, len(counts), 4)
    assert not batch.block_tables.any()  # one block will do
    assert (batch.slots == -1).all()  # and nobody writes it
    assert len(batch.sample_rows) == len(counts)


def test_what_tensors_hold_is_counted_once_and_let_go() -> None:
    import torch

    memory = HeldMemory(1000)
    outside = torch.zeros(50)
    with memory:
        first = torch.zeros(25)
        view = first.view(5, 5)[1:]
        outside.add_(1.0)
        assert memory.held_bytes == 100
        second = view + 1.0
        assert memory.held_bytes == 180
        del second
        assert (memory.held_bytes, memory.peak_bytes) == (100, 180)
        with pytest.raises(torch.OutOfMemoryError, match="100 of 1000"):
            torch.zeros(300)
        del first
        assert memory.held_bytes == 100  # the view holds it
        del view
    assert memory.held_bytes == 0


# --- an engine built on it -----------------------------------------------------


class Emulated(CupyRawBackend):
    """The backend on a device of memory that tests choose, weights counted."""

    name = "emulated"
    device: EmulatedDevice
    measured: DeviceMemory

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True)

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Emulated:
        return cls(cls.device, options)

    def _make_kernels(self, device: Device) -> CudaKernels:
        return cuda_kernels(device=device)[0]

    def create_runner(self, *arguments: Any, **named: Any) -> Any:
        with self.device.memory:
            runner: Any = super().create_runner(*arguments, **named)
        measure = runner.measure_memory

        def measured(num_replicas: int) -> DeviceMemory:
            Emulated.measured = measure(num_replicas)
            return Emulated.measured

        runner.measure_memory = measured
        return runner


class Plugin:
    @headrace.hookimpl
    def headrace_register_backends(self) -> list[type[Emulated]]:
        return [Emulated]


Build = Callable[..., BuiltEngine]


@pytest.fixture
def build(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return `build(memory_bytes, options, replicas, **engine)`: a tiny model on a device of that size."""
    source = tiny_checkpoint("llama", config={"head_dim": 64})

    def make(
        memory_bytes: int, options: dict[str, Any] | None = None, replicas: int = 1, **engine: Any
    ) -> BuiltEngine:
        monkeypatch.setattr(Emulated, "device", EmulatedDevice(2, memory_bytes), raising=False)
        flags: dict[str, Any] = {
            f"models.0.engine.{name}": str(value) for name, value in (ENGINE | engine).items()
        }
        flags |= {"models.0.source": str(source), "models.0.backend": "emulated"}
        data = replica_config(
            load_config(None, flags=flags | {"plugins.discover": False}, environ={}).config, 0
        )
        data["model"]["backend"] = {"use": "emulated", "options": options or {}}
        data["replicas_on_host"] = replicas
        return build_engine(data, plugins=[Plugin()])

    return make


LONG = {"max_model_len": 2048}
"""Two sequences of it want 8 MiB of keys and values."""
PER_BLOCK = 2 * 16 * 2 * 2 * 64 * 4


@needs_cuda_cpp
@pytest.mark.kernels
def test_the_pool_takes_what_is_left_and_the_log_says_how(build: Build) -> None:
    with structlog.testing.capture_logs() as logs:
        built = build(6 * MIB, **LONG)
    [line] = [entry for entry in logs if entry["event"] == "device memory"]
    memory = Emulated.measured
    assert (line["total"], line["kept_free"], line["graphs"]) == ("6MiB", "614.4KiB", "0")
    assert line["activations"] == about_size(memory.activation_bytes)
    assert line["blocks"] == built.card.num_blocks == memory.kv_bytes // PER_BLOCK
    assert built.card.kv_bytes_per_token * 16 == PER_BLOCK
    assert memory.weight_bytes == built.card.weight_bytes
    assert memory.activation_bytes > 3 * 300 * 4  # at the very least the logits
    held = memory.total_bytes - memory.free_bytes
    assert memory.weight_bytes < held < 2.5 * memory.weight_bytes  # and the rotary table
    left = memory.total_bytes - held - memory.activation_bytes - memory.kept_free_bytes
    assert memory.kv_bytes == left
    built.engine.close()


@needs_cuda_cpp
@pytest.mark.kernels
def test_no_more_is_taken_than_all_sequences_need(build: Build) -> None:
    built = build(64 * MIB)
    assert built.card.num_blocks == 2 * 64 // 16
    built.engine.close()


@needs_cuda_cpp
@pytest.mark.kernels
def test_a_share_is_for_weights_and_all_and_replicas_divide_it(build: Build) -> None:
    blocks = {
        name: build(8 * MIB, options, replicas, **LONG).card.num_blocks
        for name, options, replicas in (
            ("all", {"memory_share": 1.0}, 1),
            ("half", {"memory_share": 0.5}, 1),
            ("two", {"memory_share": 1.0}, 2),
        )
    }
    assert blocks["all"] - blocks["half"] == pytest.approx(4 * MIB / PER_BLOCK, abs=1)
    assert blocks["half"] <= blocks["two"] < blocks["half"] + MIB / PER_BLOCK


@needs_cuda_cpp
@pytest.mark.kernels
def test_a_given_size_is_judged_by_the_device_and_not_by_the_host(build: Build) -> None:
    message = r"engine.kv_memory: 64TiB is more than .* that the device has left \(device 8MiB"
    with pytest.raises(ConfigError, match=message):
        build(8 * MIB, kv_memory="64TiB")
    built = build(8 * MIB, kv_memory="1MiB", **LONG)
    assert built.card.num_blocks == MIB // PER_BLOCK
    assert built.card.max_model_len == MIB // PER_BLOCK * 16
    built.engine.close()


@needs_cuda_cpp
@pytest.mark.kernels
def test_where_nothing_is_left_the_error_has_the_sums_and_the_remedies(build: Build) -> None:
    with pytest.raises(ConfigError) as raised:
        build(8 * MIB, {"memory_share": 0.1})
    text = str(raised.value)
    for part in (
        "models.*.engine.kv_memory: auto leaves 0 of", "one block of 16 tokens takes 32KiB",
        "device 8MiB", "kept free 7.2MiB", "memory_share", "max_batched_tokens (24)",
        "max_num_sequences (2)",
    ):  # fmt: skip
        assert part in text


@needs_cuda_cpp
@pytest.mark.kernels
def test_weights_or_a_step_that_do_not_fit_are_told_apart(build: Build) -> None:
    with pytest.raises(ModelError, match=r"the weights of .* do not fit the device's 256KiB"):
        build(MIB // 4)
    with pytest.raises(ModelError, match=r"the largest step .* lower .*max_batched_tokens \(24\)"):
        build(5 * MIB, max_num_sequences=24)


@needs_cuda_cpp
@pytest.mark.kernels
def test_no_step_holds_more_than_the_measured_one(build: Build) -> None:
    """What makes the sum safe: prompts, decodes and draws of a real engine stay below the peak."""
    built = build(16 * MIB)
    memory, engine = Emulated.device.memory, built.engine
    for seed, prompt in enumerate(([7] * 40, [9] * 23)):
        sampling = SamplingParams(
            max_tokens=4, temperature=1.0, top_k=5, top_p=0.9, seed=seed, logprobs=20
        )
        engine.submit(
            GenerationRequest(
                request_id=str(seed),
                model=built.card.name,
                prompt_token_ids=prompt,
                sampling=sampling,
            )  # fmt: skip
        )
    before = memory.peak_bytes = memory.held_bytes
    with memory:
        while engine.has_work():
            engine.step()
    used = memory.peak_bytes - before
    assert 0.3 * Emulated.measured.activation_bytes < used <= Emulated.measured.activation_bytes
    engine.close()


@needs_cuda_cpp
@pytest.mark.kernels
def test_recorded_steps_are_counted_before_they_are_recorded(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Their own tensors to the byte, logits for each row of buckets 1, 2 and 4, and activations once."""
    model = open_checkpoint(tiny_checkpoint("gemma3_text", config={"head_dim": 64}))
    settings = EngineSettings(
        dtype="float32", kv_dtype="float32", max_model_len=64, max_num_sequences=4,
        max_batched_tokens=24,
    )  # fmt: skip
    device = Recording(2, 64 * MIB)
    ops = GpuOps(cuda_kernels(device=device)[0], device, settings, "cupy_raw")
    runner = GpuRunner(ops, model, SingleRank(), settings)
    memory = runner.measure_memory(1)
    message = r"a KV pool of 4096 blocks \(128MiB\) does not fit the 6.* free of the device's 64MiB"
    with device.memory, pytest.raises(ModelError, match=message):
        runner.allocate(4096)
    runner.allocate(1)
    own = 0
    for bucket in (1, 2, 4):
        with device.memory:
            before = device.memory.held_bytes
            step = DecodeStep(ops, bucket, 4)
            took = device.memory.held_bytes - before
        assert step.num_bytes() == took > 0
        own += took
        del step
    logits = (1 + 2 + 4) * 4 * model.architecture.vocab_size
    assert memory.graph_bytes == memory.activation_bytes + own + logits
    runner.close()


def test_nothing_of_torch_is_imported_before_a_backend_is_opened() -> None:
    code = (
        "import sys, headrace.backends.cupy_raw.backend as a, headrace.backends.cuda_numba.backend as b\n"
        "a.CupyRawBackend.probe(), b.CudaNumbaBackend.probe(), a.CupyRawBackend.Options()\n"
        "heavy = {'torch', 'numpy', 'numba', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
