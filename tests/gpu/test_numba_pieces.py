"""What the Numba kernels are made of: the simulator's stand-ins, arguments of launches, probe and cache."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.numba_simulated import needs_numba_cuda

pytestmark = needs_numba_cuda
WORDS = np.array([0x3F80C040, 0xBEEF1234, 0x007F8081, 0x7BFF03FE], np.uint32)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("unpack_f32", 4), ("unpack_bf16", 8), ("unpack_f16", 8), ("unpack_e4m3", 16),
        ("unpack_e4m3_shifted", 16), ("unpack_int8", 16), ("unpack_nibbles", 32),
    ],
)  # fmt: skip
def test_stand_ins_unpack_like_the_device_functions(name: str, size: int) -> None:
    from headrace.backends.cuda_numba.kernels import formats
    from headrace.testing import cuda_primitives
    from headrace.testing.cuda_numba import PLAIN
    from headrace.testing.cuda_simulator import rebound

    expected, got = np.zeros(size, np.float32), np.zeros(size, np.float32)
    rebound(getattr(formats, name).py_func, PLAIN)(tuple(WORDS), expected)
    getattr(cuda_primitives, name)(tuple(WORDS), got)
    np.testing.assert_array_equal(got, expected)


def test_e4m3_by_shift_is_exact_but_for_its_factor() -> None:
    from headrace.testing import cuda_primitives

    codes = [code for code in range(256) if code & 127 != 127]
    for first in range(0, len(codes) - 15, 16):
        words: Any = tuple(np.array(codes[first : first + 16], np.uint8).view(np.uint32))
        exact, shifted = np.zeros(16, np.float32), np.zeros(16, np.float32)
        cuda_primitives.unpack_e4m3(words, exact)
        cuda_primitives.unpack_e4m3_shifted(words, shifted)
        np.testing.assert_array_equal(shifted * np.float32(256.0), exact)


def test_stand_ins_compute_like_the_device_functions() -> None:
    from headrace.backends.cuda_numba.kernels import formats
    from headrace.testing import cuda_primitives

    a, b = np.arange(8, dtype=np.float32), np.array([1.0, -2.0, 0.5, 4.0], np.float32)
    assert cuda_primitives.dot(a, 2, b, 4) == formats.dot.py_func(a, 2, b, 4)
    for name in ("add_scaled", "multiply_all"):
        expected, got = a.copy(), a.copy()
        arguments: tuple[Any, ...] = (2, np.float32(0.5), b, 4)
        if name == "multiply_all":
            arguments = (2, np.float32(0.5), 4)
        getattr(formats, name).py_func(expected, *arguments)
        getattr(cuda_primitives, name)(got, *arguments)
        np.testing.assert_array_equal(got, expected)


def test_every_primitive_has_a_plain_meaning() -> None:
    from headrace.backends.cuda_numba import primitives
    from headrace.backends.cuda_numba.kernels import formats
    from headrace.testing import cuda_primitives

    for name in (*primitives.NAMES, *formats.STAND_INS):
        assert callable(getattr(cuda_primitives, name))


def test_arguments_are_addresses_and_c_scalars() -> None:
    from headrace.backends.cuda_numba.launcher import argument

    tensor = torch.zeros(3)
    assert argument(tensor) == tensor.data_ptr()
    assert argument(None) == 0
    assert isinstance(argument(np.int64(-5)), ctypes.c_int64)
    assert argument(np.float32(0.5)).value == 0.5
    with pytest.raises(TypeError, match="NumPy int32"):
        argument(7)


def test_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.backends.cuda_numba import compiling

    monkeypatch.setattr(compiling, "_folder", lambda: tmp_path / "kept")
    defines: dict[str, int | str] = {"act": "f32", "out": "f32", "activation": 0}
    first = compiling.cached_kernel("elementwise", "gate", defines, "sm_90")
    assert first[1].startswith(b"\x7fELF")

    def not_again(made: object, architecture: str) -> None:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(compiling, "compile_kernel", not_again)
    assert compiling.cached_kernel("elementwise", "gate", defines, "sm_90") == first


def test_probe_says_what_is_missing() -> None:
    from headrace.backends.cuda_numba.backend import CudaNumbaBackend

    found = CudaNumbaBackend.probe()
    assert found.ok or found.reason
