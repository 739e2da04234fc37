"""One backend on one device: the real one, or the emulated one of a dry run. Sections see no difference."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu_check.figures import FAILED, OK, SKIPPED, WRONG, Figure, measured

TIMED_RUNS = 30
SWEPT_BYTES = 1 << 30
"""Written before each timed run: many times any card's L2 cache, and a quarter of a millisecond of an H200."""


class Unavailable(RuntimeError):
    """The backend does not run here."""


DECODE_BATCHES: Mapping[str, tuple[int, ...]] = {
    "even": (4096,) * 32,
    "skewed": (16_384,) * 4 + (2_048,) * 28 + (8_192,),
    "single": (16_384,),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is computed: a device's share, and the little that an emulated one has time for."""

    attention_cases: int | None = None
    row_cases: int | None = None
    """The first so many; None: all."""
    decode_batches: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: DECODE_BATCHES)
    """Rows of keys of each sequence of the batches whose decode is measured."""
    num_kv_heads: int = 8
    copy_bytes: int = 1 << 30
    sampled: tuple[int, int] = (64, 128_256)
    launches: int = 200
    steps: int = 50
    batches: tuple[int, int] = (1, 32)
    context: int = 512
    new_tokens: int = 48
    num_prompts: int = 6
    timed_runs: int = TIMED_RUNS


SMALL = Sizes(
    attention_cases=2, row_cases=3, num_kv_heads=2, copy_bytes=1 << 16,
    decode_batches={"even": (32, 32), "skewed": (64, 9), "single": (40,)}, sampled=(2, 300), launches=2,
    steps=1, batches=(1, 2), context=8, new_tokens=4, num_prompts=2, timed_runs=1,
)  # fmt: skip


@dataclass(slots=True)
class Stage:
    """What a section works with. Mutable: `record` hands figures out as they come."""

    backend: str
    section: str
    model: str
    sizes: Sizes
    is_dry: bool
    write: Callable[[Figure], None]
    kernels: Any
    device: Any

    @property
    def torch_device(self) -> torch.device:
        found: torch.device = self.device.torch_device
        return found

    @property
    def backend_class(self) -> Any:
        return load_backend(self.backend)

    def measured(self, name: str, value: float) -> None:
        """Record a figure; a dry run's is held against nothing."""
        figure = measured(self.backend, self.section, name, value)
        self.write(replace(figure, verdict="") if self.is_dry else figure)

    def judged(self, name: str, is_right: bool, note: str = "") -> None:
        self._noted(name, OK if is_right else WRONG, note)

    def told(self, name: str, note: str) -> None:
        """Record a fact that is neither right nor wrong."""
        self._noted(name, "", note)

    def skipped(self, name: str, reason: str) -> None:
        self._noted(name, SKIPPED, reason)

    def failed(self, name: str, error: BaseException) -> None:
        self._noted(name, FAILED, reason_of(error))

    def _noted(self, name: str, verdict: str, note: str) -> None:
        self.write(Figure(self.backend, self.section, name, None, verdict, note))

    def microseconds(self, run: Callable[[], object]) -> float:
        """Return the median device time of one run with cold caches, after a warm-up.

        The cache is overwritten between runs, which also keeps the device busy while the host launches:
        what is measured is the device's time, also of a draw of a dozen kernels.
        """
        repeats = self.sizes.timed_runs
        if self.torch_device.type != "cuda":
            return sorted(_host_microseconds(run) for _ in range(repeats))[repeats // 2]
        sweep = torch.empty(SWEPT_BYTES, dtype=torch.uint8, device=self.torch_device)
        for _ in range(3):
            run()
        pairs = []
        for _ in range(repeats):
            sweep.zero_()
            sweep.zero_()
            first, last = (_timing_event() for _ in range(2))
            first.record()
            run()
            last.record()
            pairs.append((first, last))
        self.device.synchronize()
        return float(sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)[repeats // 2])


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_microseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def reason_of(error: BaseException) -> str:
    """Return an error in one line."""
    told = str(error).strip().splitlines()
    return f"{type(error).__name__}: {told[0][:160]}" if told else type(error).__name__


def load_backend(name: str) -> Any:
    """Return the class of a backend. PluginError where there is none of that name."""
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import Registries

    registries = Registries.from_manager(create_plugin_manager(discover=False))
    return registries.resolve("backends", name, Path())


@contextlib.contextmanager
def staged(
    backend: str, section: str, model: str, write: Callable[[Figure], None], *, is_dry: bool
) -> Iterator[Stage]:
    """Open the backend on its device. Unavailable says what is lacking."""
    with emulated(backend) if is_dry else contextlib.nullcontext():
        chosen = load_backend(backend)
        available = chosen.probe()
        if not available.ok:
            raise Unavailable(available.reason)
        from headrace.clock import SystemClock

        opened = chosen.open(0, None, SystemClock())
        sizes = SMALL if is_dry else Sizes()
        yield Stage(backend, section, model, sizes, is_dry, write, opened._kernels, opened._device)


@contextlib.contextmanager
def emulated(backend: str) -> Iterator[None]:
    """Let the backend open the emulated device, and what it records be run anew when it is replayed."""
    from headrace.backends.gpu.graphs import DecodeStep
    from headrace.interfaces import Availability

    chosen = load_backend(backend)
    there = classmethod(lambda cls: Availability(True))
    opened = classmethod(lambda cls, index, options, clock: cls(_emulated_device()))
    with (
        mock.patch.object(chosen, "probe", there),
        mock.patch.object(chosen, "open", opened),
        mock.patch.object(
            chosen, "_make_kernels", lambda self, device: _emulated_kernels(backend, device)
        ),
        mock.patch.object(DecodeStep, "capture", _pretend_capture),
        mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, 0)),
    ):
        yield


def _emulated_device() -> Any:
    from headrace.testing.cuda_cpu.launcher import EmulatedDevice

    device = EmulatedDevice()
    device.can_capture = True
    device.name = "emulated"  # type: ignore[attr-defined]
    return device


def _emulated_kernels(backend: str, device: Any) -> Any:
    if backend == "cupy_raw":
        from gpu.cuda_cpp import cuda_kernels

        return cuda_kernels(device=device)[0]
    from gpu.numba_simulated import numba_kernels

    return numba_kernels(device=device)[0]


class _Pretended:
    """Passes for a CUDA graph: a replay runs the forward on the tensors that were filled."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def _pretend_capture(
    step: Any, forward: Callable[[Any], torch.Tensor], pool: object = None
) -> None:
    step._logits = forward(step.step)

    def replay() -> None:
        step._logits.copy_(forward(step.step))

    step._graph = _Pretended(replay)


@functools.cache
def checkpoint_of(model: str) -> Path:
    """Return the path of a model, fetched where it is absent; "": a tiny one of random numbers."""
    if not model:
        from headrace.testing.tiny_models import write_tiny_checkpoint

        size = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return write_tiny_checkpoint(folder, "llama", config=size, dtype="bfloat16")
    from headrace.models.sources import fetch

    return fetch(model, report=lambda stage, fraction: None)
