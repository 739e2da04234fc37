"""Compiles CUDA C++ kernel files with g++ through cuda_cpu.h and launches them on tensors in host memory.

`CpuLauncher` implements headrace.backends.gpu.device.Launcher, `EmulatedDevice` its Device: together they are
the emulated GPU of the tests. Everything else of a backend runs unchanged on them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.backends.cupy_raw.compiling import cuda_include
from headrace.cache import cache_folder
from headrace.testing.cuda_cpu.memory import HeldMemory

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Dimensions

HERE = Path(__file__).parent
ORDERS = ("forward", "reverse", "random")
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s*(\w+)\(')
_FLAGS = (
    "-std=gnu++17", "-g1", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
    "-fno-gnu-unique", "-fvisibility=hidden",
)  # fmt: skip


class KernelError(RuntimeError):
    """A kernel does not compile, or broke a rule of CUDA while it ran."""


def missing_tools() -> str:
    """Return what this machine lacks for running CUDA C++ on its CPU; "" where nothing."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if cuda_include() is None:
        return "no CUDA headers: install the extra 'kernels'"
    return ""


class CpuKernel:
    """One kernel of a compiled file. Implements headrace.backends.gpu.device.Kernel."""

    def __init__(self, launcher: CpuLauncher, library: ctypes.CDLL, name: str) -> None:
        self._launcher = launcher
        self._library = library
        self._name = name
        self._launch = getattr(library, f"launch_{name}")
        sizes = (ctypes.c_size_t * 64)()
        count = getattr(library, f"sizes_{name}")(sizes)
        self._sizes = list(sizes[:count])

    def __call__(
        self, grid: Dimensions, block: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Run the kernel to its end. KernelError says which rule it broke, or which argument is misshapen."""
        if min(grid) < 1:
            raise KernelError(f"{self._name}: a device refuses a grid of {grid}")
        held = [_argument(value) for value in arguments]
        for index, (value, size) in enumerate(zip(held, self._sizes, strict=False)):
            if ctypes.sizeof(value) != size:
                raise KernelError(
                    f"{self._name}: argument {index} has {ctypes.sizeof(value)} bytes, the kernel takes {size}"
                )
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        self._library.cuda_cpu_configure(*self._launcher.configuration)
        self._launcher.num_launches += 1
        status = self._launch(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(block, 1, 1),
            ctypes.c_size_t(shared_bytes), addresses, ctypes.c_size_t(len(held)),
        )  # fmt: skip
        if status:
            raise KernelError(f"{self._name}: {self._library.cuda_cpu_failure().decode()}")


class CpuLauncher:
    """Compiles and runs kernel files of one folder. Mutable: `order` is the next launch's."""

    def __init__(
        self,
        folder: Path,
        *,
        sanitize: str = "",
        extra_defines: Mapping[str, int | str] | None = None,
    ) -> None:
        """`sanitize`: "", "address,undefined" or "thread"; the process must have its library preloaded."""
        self._folder = folder
        self._sanitize = sanitize
        self._extra = dict(extra_defines or {})
        self._libraries: dict[tuple[Any, ...], ctypes.CDLL] = {}
        self._kernels: dict[tuple[Any, ...], CpuKernel] = {}
        self.configuration = (0, 0, 0, 0)
        self.num_launches = 0

    def configure(
        self, order: str = "forward", *, seed: int = 1, unordered: bool = False, early: bool = False
    ) -> None:
        """Set the order of threads, whether blocks are unordered (thread sanitizer only), and whether
        asynchronous copies land at once."""
        self.configuration = (ORDERS.index(order), seed, int(unordered), int(early))

    def kernel(self, source: str, name: str, defines: Mapping[str, int | str]) -> CpuKernel:
        key = (source, tuple(sorted(defines.items())))
        if (key, name) not in self._kernels:
            if key not in self._libraries:
                path = self._compiled(source, {**defines, **self._extra})
                library = ctypes.CDLL(str(path))
                library.cuda_cpu_failure.restype = ctypes.c_char_p
                self._libraries[key] = library
            self._kernels[key, name] = CpuKernel(self, self._libraries[key], name)
        return self._kernels[key, name]

    def _compiled(self, source: str, defines: Mapping[str, int | str]) -> Path:
        reason = missing_tools()
        if reason:
            raise KernelError(reason)
        text = (self._folder / source).read_text()
        exports = "".join(f"CUDA_CPU_EXPORT({name})\n" for name in _KERNEL.findall(text))
        code = f'#include "cuda_cpu.h"\n#include "{source}"\n{exports}'
        common = [*_FLAGS, "-O1", f"-I{cuda_include()}"]
        if self._sanitize:
            common += [f"-fsanitize={self._sanitize}", "-fno-omit-frame-pointer"]
            common += ["-fno-sanitize-recover=undefined"] if "undefined" in self._sanitize else []
        flags = [*common, f"-I{HERE}", f"-I{self._folder}"]
        flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
        sources = [*sorted(HERE.glob("*.h")), *sorted(self._folder.glob("*.cu*"))]
        digest = hashlib.sha256("\0".join([code, *flags]).encode())
        for file in sources:
            digest.update(file.read_bytes())
        target = cache_folder() / "cuda_cpu" / f"{digest.hexdigest()[:24]}.so"
        if not target.exists():
            # found before cuda_cpu.h itself, and passed over where g++ cannot use it
            header = _parsed_header(common, self._sanitize or "plain")
            _run_compiler(code, [f"-I{header}", *flags], target)
        return target


def _run_compiler(code: str, flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.part")
    command = ["g++", *flags, "-shared", "-x", "c++", "-", "-o", str(partial)]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"g++ refuses the kernel:\n{done.stderr[:4000]}")
    partial.replace(target)


@functools.cache
def _compiler_version() -> str:
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def _parsed_header(flags: Sequence[str], name: str) -> Path:
    """Return a folder with cuda_cpu.h already parsed for these flags: most of a kernel's compile time.

    One of 64 MB is kept per sanitizer. g++ itself refuses it where a flag that matters differs.
    """
    digest = hashlib.sha256("\0".join([_compiler_version(), *flags]).encode())
    for file in sorted(HERE.glob("*.h")):
        digest.update(file.read_bytes())
    kept = cache_folder() / "cuda_cpu"
    folder = kept / f"header-{name}-{digest.hexdigest()[:24]}"
    target = folder / "cuda_cpu.h.gch"
    folder.mkdir(parents=True, exist_ok=True)
    with (kept / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that want it at once wait for the first one
        if target.exists():
            return folder
        for old in set(kept.glob(f"header-{name}-*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
        partial = folder / "partial"
        command = ["g++", *flags, "-x", "c++-header", str(HERE / "cuda_cpu.h"), "-o", str(partial)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            partial.replace(target)
    return folder


def _argument(value: Any) -> ctypes.Array[Any] | ctypes.c_void_p:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, np.generic):
        return (ctypes.c_char * value.nbytes).from_buffer_copy(value.tobytes())
    raise TypeError(
        f"a kernel's argument is a tensor, None or a NumPy scalar, not {type(value).__name__}"
    )


class EmulatedDevice:
    """Host memory that passes for a device. Implements headrace.backends.gpu.device.Device."""

    architecture = "sm_90"
    can_capture = False

    def __init__(self, num_multiprocessors: int = 4, memory_bytes: int = 1 << 30) -> None:
        """What is made under `with device.memory:` counts against `memory_bytes`, as a GPU's tensors do."""
        self.torch_device = torch.device("cpu")
        self.num_multiprocessors = num_multiprocessors
        self.memory = HeldMemory(memory_bytes)

    def total_bytes(self) -> int:
        return self.memory.limit_bytes

    def free_bytes(self) -> int:
        return self.memory.limit_bytes - self.memory.held_bytes

    def peak_of(self, run: Callable[[], None]) -> int:
        with self.memory:
            self.memory.peak_bytes = self.memory.held_bytes
            run()
        return self.memory.peak_bytes - self.memory.held_bytes

    def synchronize(self) -> None:
        """A launch has ended when it returns."""
