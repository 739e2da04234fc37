"""What a GPU backend does between a kernel's source and the driver: code kept on disk, arguments laid out.

The driver is the only part that is pretended here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from gpu.numba_simulated import needs_numba_cuda

from headrace.backends.cupy_raw.launcher import CupyKernel, argument_bytes
from headrace.backends.cupy_raw.sampling_launches import ROWS
from headrace.backends.gpu.kernel_cache import entry_name, kept_code
from headrace.errors import ConfigError

STREAM = 0x5EED
needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="cupy is not installed; the extra 'kernels'"
)
needs_cuda_core = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed; the extra 'kernels'",
)


# --- code kept on disk ---------------------------------------------------------


class Builder:
    """Makes code and counts how often."""

    def __init__(self, code: bytes = b"\x7fELF code") -> None:
        self.code = code
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return self.code


def test_code_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert kept_code(lambda: tmp_path / "a" / "b", "x.bin", build) == build.code
    assert build.count == 1


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="cut short"),
        pytest.param(lambda data: data[:20], id="cut in its digest"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:40] + b"\0" + data[41:], id="a byte is another"),
        pytest.param(lambda data: bytes(len(data)), id="zeros, as after a crash"),
        pytest.param(lambda data: data[32:], id="without a digest, as an older version kept it"),
    ],
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    build = Builder()
    kept_code(lambda: tmp_path, "x.bin", build)
    path = tmp_path / "x.bin"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept_code(lambda: tmp_path, "x.bin", build) == build.code
    assert build.count == 2
    assert path.read_bytes() == whole


def test_without_a_folder_code_is_built_each_time_and_said_to_be(tmp_path: Path) -> None:
    def nowhere() -> Path:
        raise ConfigError("no home")

    (tmp_path / "file").write_text("")
    build = Builder()
    for folder in (nowhere, lambda: tmp_path / "file"):
        with structlog.testing.capture_logs() as logs:
            assert kept_code(folder, "x.bin", build) == build.code
        assert [entry["event"] for entry in logs][-1] == "the compiled kernel is not kept"
    assert build.count == 2


def test_what_building_raises_goes_through_and_keeps_nothing(tmp_path: Path) -> None:
    def build() -> bytes:
        raise ConfigError("NVRTC refuses")

    with pytest.raises(ConfigError, match="NVRTC refuses"):
        kept_code(lambda: tmp_path, "x.bin", build)
    assert list(tmp_path.iterdir()) == []


def test_the_name_tells_sources_and_facts_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a.cu", tmp_path / "b.cuh"
    first.write_text("ab")
    second.write_text("c")
    names = {entry_name("k-sm_90", facts, [first, second]) for facts in (1, 2, ("x", 1))}
    first.write_text("a")
    second.write_text("bc")  # the same letters, cut elsewhere
    names.add(entry_name("k-sm_90", 1, [first, second]))
    second.rename(tmp_path / "c.cuh")
    names.add(entry_name("k-sm_90", 1, [first, tmp_path / "c.cuh"]))
    assert len(names) == 5
    assert all(name.startswith("k-sm_90-") for name in names)


@needs_cupy
def test_cuda_code_is_kept_by_source_defines_and_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.cupy_raw import compiling

    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(
        compiling, "FOLDER", Path(shutil.copytree(compiling.FOLDER, tmp_path / "cuda"))
    )
    made: list[tuple[Any, ...]] = []

    def compiled(source: str, defines: Any, architecture: str) -> compiling.Compiled:
        made.append((source, dict(defines), architecture))
        return compiling.Compiled(repr(made[-1]).encode(), "")

    monkeypatch.setattr(compiling, "compile_kernels", compiled)
    wanted = [
        ("rows.cu", {"IN": 1, "OUT": 1}, "sm_90"),
        ("rows.cu", {"IN": 1, "OUT": 0}, "sm_90"),
        ("rows.cu", {"IN": 1, "OUT": 1}, "sm_80"),
        ("linear.cu", {"IN": 1, "OUT": 1}, "sm_90"),
    ]
    for _ in range(2):
        codes = [compiling.cached_kernels(*arguments) for arguments in wanted]
    assert len(made) == len(set(codes)) == 4
    assert compiling.cached_kernels("rows.cu", {"OUT": 1, "IN": 1}, "sm_90") == codes[0]
    assert len(made) == 4, "the order of defines says nothing"
    with (tmp_path / "cuda" / "primitives.cuh").open("a") as file:
        file.write("// included by all\n")
    compiling.cached_kernels(*wanted[0])
    assert len(made) == 5
    assert len(list((tmp_path / "cache" / "kernels" / "cupy_raw").iterdir())) == 5


@needs_numba_cuda
def test_numba_code_is_kept_by_source_defines_and_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.cuda_numba import compiling

    here = Path(shutil.copytree(compiling.HERE, tmp_path / "here"))
    monkeypatch.setattr(compiling, "HERE", here)
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / "cache")
    made = []

    def compiled(source: Any, architecture: str) -> compiling.Compiled:
        made.append(architecture)
        return compiling.Compiled(f"entry{len(made)}", b"\x7fELF\0with\0zeros", "", 128)

    monkeypatch.setattr(compiling, "compile_kernel", compiled)
    defines: dict[str, int | str] = {"act": "f32", "out": "f32", "activation": 0}
    wanted = [
        ("elementwise", "gate", defines, "sm_90"),
        ("elementwise", "gate", defines | {"activation": 1}, "sm_90"),
        ("elementwise", "gate", defines, "sm_80"),
    ]
    for _ in range(2):
        found = [compiling.cached_kernel(*arguments) for arguments in wanted]
    assert [name for name, _ in found] == ["entry1", "entry2", "entry3"]
    assert {code for _, code in found} == {b"\x7fELF\0with\0zeros"}
    with (here / "primitives.py").open("a") as file:
        file.write("# used by all\n")
    assert compiling.cached_kernel(*wanted[0])[0] == "entry4"
    for path in (tmp_path / "cache" / "kernels" / "cuda_numba").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert compiling.cached_kernel(*wanted[0]) == ("entry5", b"\x7fELF\0with\0zeros")


# --- arguments and launches ----------------------------------------------------


@pytest.fixture(autouse=True)
def torch_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """torch's current stream, which a test may exchange as a capture does."""
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    yield stream


class Driver:
    """Reads a launch as the driver does: one address per argument, at which the argument's bytes are."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.attributes: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.arguments: list[bytes] = []

    def funcSetAttribute(self, *arguments: Any) -> None:
        self.attributes.append(arguments)

    def launchKernel(self, *arguments: Any) -> None:
        *geometry, block, extra = arguments
        self.launches.append((*geometry, extra))
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(block)
        self.arguments = [
            ctypes.string_at(address, size)
            for address, size in zip(addresses, self.sizes, strict=True)
        ]


def test_cupy_arguments_are_the_bytes_the_kernel_reads() -> None:
    tensor = torch.arange(6, dtype=torch.int32)[2:]
    rows = np.array((*range(7), 300, 5), ROWS)[()]
    values = [tensor, None, np.int64(-2), np.int32(-3), np.float32(0.25), rows]
    driver = Driver([8, 8, 8, 4, 4, ROWS.itemsize])
    CupyKernel(SimpleNamespace(ptr=77), driver)((3, 2, 1), 128, 1024, values)
    assert driver.launches == [(77, 3, 2, 1, 128, 1, 1, 1024, STREAM, 0)]
    address, null, long, short, number, struct = driver.arguments
    assert int.from_bytes(address, "little") == tensor.data_ptr()  # where the slice begins
    assert null == bytes(8)
    assert int.from_bytes(long, "little", signed=True) == -2
    assert int.from_bytes(short, "little", signed=True) == -3
    assert np.frombuffer(number, np.float32)[0] == 0.25
    assert struct == rows.tobytes() and ROWS.itemsize == 7 * 8 + 2 * 4
    with pytest.raises(TypeError, match="not int"):
        argument_bytes(7)


def test_cupy_asks_for_more_shared_memory_once() -> None:
    driver = Driver([])
    kernel = CupyKernel(SimpleNamespace(ptr=77), driver)
    for shared in (48 << 10, 64 << 10, 64 << 10, 50 << 10, 96 << 10):
        kernel((1, 1, 1), 32, shared, ())
    assert driver.attributes == [(77, 8, 64 << 10), (77, 8, 96 << 10)]


def test_cupy_launches_on_the_stream_of_the_moment(torch_stream: SimpleNamespace) -> None:
    driver = Driver([])
    kernel = CupyKernel(SimpleNamespace(ptr=1), driver)
    kernel((1, 1, 1), 32, 0, ())
    torch_stream.cuda_stream = 9
    kernel((1, 1, 1), 32, 0, ())
    assert [launch[8] for launch in driver.launches] == [STREAM, 9]


@needs_cuda_core
def test_numba_launches_with_prepared_geometry_and_arguments(
    monkeypatch: pytest.MonkeyPatch, torch_stream: SimpleNamespace
) -> None:
    import cuda.core

    from headrace.backends.cuda_numba.launcher import NumbaKernel, NumbaLauncher

    launches: list[tuple[Any, ...]] = []
    configurations: list[dict[str, Any]] = []

    def configure(**geometry: Any) -> dict[str, Any]:
        configurations.append(geometry)
        return geometry

    monkeypatch.setattr(cuda.core, "LaunchConfig", configure)
    monkeypatch.setattr(cuda.core, "launch", lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(
        cuda.core, "Stream", SimpleNamespace(from_handle=lambda handle: ("stream", handle))
    )
    launcher = object.__new__(NumbaLauncher)
    launcher._streams = {}
    handle = SimpleNamespace(attributes=SimpleNamespace(max_dynamic_shared_size_bytes=None))
    kernel = NumbaKernel(launcher, handle)
    tensor = torch.zeros(3)
    kernel((2, 1, 1), 64, 96 << 10, (tensor, None, np.int32(5), np.float32(1.5)))
    torch_stream.cuda_stream = 9
    kernel((2, 1, 1), 64, 96 << 10, ())
    kernel((4, 1, 1), 64, 0, ())
    assert configurations == [
        {"grid": (2, 1, 1), "block": 64, "shmem_size": 96 << 10},
        {"grid": (4, 1, 1), "block": 64, "shmem_size": 0},
    ]
    assert handle.attributes.max_dynamic_shared_size_bytes == 96 << 10
    assert [launch[0] for launch in launches] == [("stream", STREAM), *[("stream", 9)] * 2]
    _, _, launched, address, null, number, factor = launches[0]
    assert launched is handle
    assert (address, null) == (tensor.data_ptr(), 0)
    assert (type(number), number.value) == (ctypes.c_int32, 5)
    assert (type(factor), factor.value) == (ctypes.c_float, 1.5)
