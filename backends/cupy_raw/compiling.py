"""CUDA C++ to machine code by NVRTC, kept on disk by everything it depends on. Needs no GPU and no driver."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.backends.gpu.kernel_cache import entry_name, kept_code
from headrace.cache import cache_folder
from headrace.errors import ConfigError

FOLDER = Path(__file__).parent / "cuda"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what ptxas said of it ("" where it came from the cache)."""

    cubin: bytes
    log: str


def cuda_include() -> Path | None:
    """Return the folder of CUDA's headers: of the toolkit packages, else of an installed toolkit."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    places = [*(Path(root) / "cu13" / "include" for root in roots), Path("/usr/local/cuda/include")]
    return next((place for place in places if (place / "cuda_fp8.h").exists()), None)


def compile_kernels(source: str, defines: Mapping[str, int | str], architecture: str) -> Compiled:
    """Compile one file of cuda/ for `architecture` (sm_90). ConfigError with the compiler's words."""
    from cupy.cuda import nvrtc

    include = cuda_include()
    if include is None:
        raise ConfigError(
            "backend 'cupy_raw' finds no CUDA headers: pip install 'headrace[cupy]', which brings them"
        )
    text = (FOLDER / source).read_text()
    options = (
        f"-arch={architecture}", "-std=c++17", "--ptxas-options=-v", f"-I{FOLDER}", f"-I{include}",
        f"-I{include}/cccl", *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    )  # fmt: skip
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        # CuPy takes the cubin for a text and drops its last byte, a zero that readers of ELF miss
        return Compiled(nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise ConfigError(f"NVRTC refuses {source} for {architecture}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def cached_kernels(source: str, defines: Mapping[str, int | str], architecture: str) -> bytes:
    """Return the cubin from the cache folder, compiled and put there if absent. Such a folder need not be.

    The key is everything the code depends on: sources, what it is specialised for, architecture, compiler.
    """
    from cupy.cuda import nvrtc

    facts = source, sorted(defines.items()), architecture, nvrtc.getVersion()
    name = entry_name(
        f"{Path(source).stem}-{architecture}",
        facts,
        (*sorted(FOLDER.glob("*.cu*")), Path(__file__)),
    )
    return kept_code(_folder, name, lambda: compile_kernels(source, defines, architecture).cubin)


def _folder() -> Path:
    return cache_folder() / "kernels" / "cupy_raw"
