"""Which path serves a model: by settings, by the CPU, by the variable; and each level gives the same model."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numba
import numpy as np
import pytest
from llvmlite import binding

from headrace.backends.cpu.backend import CpuBackend
from headrace.backends.cpu.fast import capability
from headrace.backends.cpu.fast.capability import choose_level
from headrace.backends.cpu.fast.runner import FastRunner, chosen_kv_dtype, reason_against
from headrace.backends.runner import OpsRunner
from headrace.clock import SystemClock
from headrace.errors import ConfigError
from headrace.group import SingleRank
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings, KVGroupSpec

FAST = EngineSettings(max_model_len=256)
ALL = dict.fromkeys(
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"), True
)


@pytest.mark.parametrize(
    ("wanted", "missing", "level"),
    [
        ("", "", "avx512_vnni"),
        ("amx", "", "avx512_vnni"),
        ("", "avx512vnni", "avx2"),
        ("avx512_vnni", "avx512vnni", "avx2"),
        ("avx2", "", "avx2"),
        ("avx2", "fma", "generic"),
        ("generic", "", "generic"),
        ("reference", "", "reference"),
    ],
)
def test_the_best_level_that_the_cpu_has_and_the_user_allows(
    wanted: str, missing: str, level: str
) -> None:
    assert choose_level(wanted, {name: name != missing for name in ALL}) == level


def test_a_cpu_that_reports_nothing_gets_no_code_that_needs_f16c() -> None:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    assert choose_level("", {}) == ("reference" if is_x86 else "generic")


def test_an_unknown_level_is_named_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_CPU_CAPABILITY is 'sse9'.*avx512_vnni.*unset"):
        choose_level("sse9", ALL)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"block_size": 32}, ""),
        ({"dtype": "float16"}, ""),
        ({"deterministic": True}, ""),
        ({"kv_dtype": "int8"}, ""),
        ({"dtype": "float32"}, "dtype float32"),
        ({"kv_dtype": "float32"}, "dtype bfloat16 with kv_dtype float32"),
        ({"block_size": 8}, "block_size 8"),
    ],
)
def test_settings_it_cannot_serve_have_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = reason_against(msgspec.structs.replace(FAST, **changes), SingleRank())
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("changes", "head_dim", "kept"),
    [
        ({}, 64, "int8"),
        ({}, 128, "int8"),
        ({}, 256, "bfloat16"),
        ({"activations": "precise"}, 64, "bfloat16"),
        ({"activations": "int8"}, 64, "int8"),
        ({"may_choose_kv_dtype": False}, 64, "bfloat16"),
        ({"may_choose_kv_dtype": False, "kv_dtype": "int8"}, 256, "int8"),
        ({"dtype": "float32", "kv_dtype": "float32"}, 64, "float32"),
    ],
)
def test_keys_and_values_have_8_bits_where_that_may_be_chosen_and_costs_little(
    changes: dict[str, Any], head_dim: int, kept: str
) -> None:
    settings = msgspec.structs.replace(FAST, **{"may_choose_kv_dtype": True, **changes})
    groups = [
        KVGroupSpec(name=f"{size}", layers=(i,), num_kv_heads=1, head_dim=size)
        for i, size in enumerate((16, head_dim))
    ]
    assert chosen_kv_dtype(settings, groups) == kept


def test_a_runner_says_how_it_keeps_keys_and_values(tiny_checkpoint: Callable[..., Path]) -> None:
    settings = msgspec.structs.replace(FAST, may_choose_kv_dtype=True)
    runner = FastRunner(open_checkpoint(tiny_checkpoint()), SingleRank(), settings)
    assert runner.memory().kv_dtype == "int8"
    runner.close()


@pytest.mark.parametrize(
    ("level", "settings", "kind"),
    [
        (capability.level(), FAST, FastRunner),
        (capability.level(), msgspec.structs.replace(FAST, deterministic=True), FastRunner),
        (capability.level(), msgspec.structs.replace(FAST, dtype="float32"), OpsRunner),
    ],
)
def test_the_backend_chooses_once_per_model(
    level: str,
    settings: EngineSettings,
    kind: type,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(capability.VARIABLE, level)
    backend = CpuBackend.open(0, None, SystemClock())
    runner = backend.create_runner(open_checkpoint(tiny_checkpoint()), SingleRank(), settings)
    assert isinstance(runner, kind)
    runner.close()


def test_a_model_that_does_not_fit_tiles_gets_the_reference_path(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(capability.VARIABLE, capability.level())
    model = open_checkpoint(tiny_checkpoint(config={"intermediate_size": 80}))
    backend = CpuBackend.open(0, None, SystemClock())
    runner = backend.create_runner(model, SingleRank(), FAST)
    assert isinstance(runner, OpsRunner)
    runner.close()


def test_int8_rows_without_the_fast_path_are_refused_with_the_reason(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(capability.VARIABLE, capability.level())
    model = open_checkpoint(tiny_checkpoint(config={"intermediate_size": 80}))
    backend = CpuBackend.open(0, None, SystemClock())
    small = msgspec.structs.replace(FAST, kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"kv_dtype is 'int8'.*multiple of.*kv_dtype: auto"):
        backend.create_runner(model, SingleRank(), small)
    small = msgspec.structs.replace(small, block_size=8)
    with pytest.raises(ConfigError, match=r"kv_dtype is 'int8'.*block_size 8.*kv_dtype: auto"):
        backend.create_runner(model, SingleRank(), small)


SCRIPT = """
import json, pathlib, sys
import numpy as np
from headrace.backends.batches import SequenceStep, forward_batch
from headrace.backends.cpu.backend import CpuBackend
from headrace.backends.cpu.fast import capability
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings

backend = CpuBackend.open(0, None, SystemClock())
model = open_checkpoint(pathlib.Path(sys.argv[1]))
settings = EngineSettings(max_model_len=256, num_threads=2, activations=sys.argv[2])
runner = backend.create_runner(model, SingleRank(), settings)
runner.allocate(4)
tokens = list(range(40, 73))
batch = forward_batch([SequenceStep(tokens, 0, [2, 0, 3], [0, 20, 32])], block_size=16)
handle = runner.execute(batch)
handle.sample()
drawn = handle.result().token_ids.tolist()
rows = runner.last_logits().tolist()
print(json.dumps([type(runner).__name__, capability.level(), "torch" in sys.modules, rows, drawn]))
runner.close()
"""


def run_at(level: str, model: Path, activations: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), activations],
        env={**os.environ, capability.VARIABLE: level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("activations", "apart"), [("precise", 0.2), ("mixed", 1.0)])
def test_every_level_computes_the_same_model_without_torch(
    activations: str, apart: float, smollm2_gguf: Path
) -> None:
    """Real blocks of 4 and of 8 bits. Attention rounds to bf16 what its sums leave, whose last bits differ,
    and with them every so often a code of 8 bits."""
    best = capability.level()
    levels = capability.LEVELS[capability.LEVELS.index(best) : -1]
    _, _, _, expected, drawn = run_at(best, smollm2_gguf, activations)
    for level in levels:
        kind, chosen, has_torch, rows, tokens = run_at(level, smollm2_gguf, activations)
        assert (kind, chosen, has_torch) == ("FastRunner", level, False)
        np.testing.assert_allclose(rows, expected, atol=apart)
        assert tokens == drawn


@pytest.mark.parametrize(
    "level", capability.LEVELS[capability.LEVELS.index(capability.level()) + 1 : -1]
)
def test_operations_are_right_at_lower_levels(level: str) -> None:
    """The operations' own tests, in a process whose kernels are of that level."""
    run_tests_of_operations({capability.VARIABLE: level})


@pytest.mark.skipif(capability.level() != capability.AVX512_VNNI, reason="needs AVX-512 VNNI")
def test_operations_are_right_as_the_other_maker_of_cpus_wants_them() -> None:
    """Kernels for a CPU whose ports are unlike this one's, less what this one may lack."""
    cpu = "znver4" if capability.has_two_ports() else "cascadelake"
    told = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "-sse4a"}
    run_tests_of_operations({capability.VARIABLE: capability.AVX512_VNNI, **told})


def run_tests_of_operations(environment: dict[str, str]) -> None:
    tests = [
        str(Path(__file__).with_name(f"test_cpu_fast_{name}.py")) for name in ("ops", "attention")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:]


COMPILED = """
import json, sys
import numba
from llvmlite import binding

cpu, features = sys.argv[1], sys.argv[2].split(",")
numba.config.CPU_NAME, numba.config.CPU_FEATURES = cpu, ""
binding.get_host_cpu_features = lambda: dict.fromkeys(features, True)
from headrace.backends.cpu.fast import intrinsics
from headrace.backends.cpu.fast.kernels_attend_pairs import blend_pairs, query_pairs
from headrace.backends.cpu.fast.kernels_quantize import quantize_row
from headrace.backends.cpu.fast.kernels_rowwise import half_at, store_half

@numba.njit
def kernel(a, b, c, scale):
    quantize_row(a, b, c, a, b)
    query_pairs(a, scale, b, c)
    blend_pairs(a, b, c, a, b, c, a, b)
    store_half(a, half_at(b))

kernel.compile((numba.int64,) * 3 + (numba.float32,))
code = kernel.inspect_asm(kernel.signatures[0])
print(json.dumps([intrinsics.LEVEL, [name for name in ("__trunc", "__extend") if name in code]]))
"""


@pytest.mark.parametrize(
    ("maker", "told", "has_two", "has_brain"),
    [
        ({"sse4a": True}, None, False, True),
        ({"sse4a": False}, None, True, False),
        ({"sse4a": True}, "cascadelake", True, False),
        ({"sse4a": False}, "znver4", False, False),
    ],
)
def test_ports_and_dot_products_of_bf16_follow_the_maker(
    maker: dict[str, bool],
    told: str | None,
    has_two: bool,
    has_brain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = {**ALL, "avx512bf16": True, **maker}
    monkeypatch.setenv(capability.VARIABLE, capability.AVX512_VNNI)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(numba.config, "CPU_NAME", told)
    for function in (capability.level, capability.has_two_ports):
        function.cache_clear()
    try:
        assert capability.has_two_ports() is has_two
        assert capability.has_brain_dot() is has_brain
    finally:
        for function in (capability.level, capability.has_two_ports):
            function.cache_clear()


def test_a_cpu_that_numba_was_told_gets_no_instructions_it_may_lack() -> None:
    script = "from headrace.backends.cpu.fast import capability; print(capability.level())"
    env = {name: value for name, value in os.environ.items() if name != capability.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "reference"


AVX512 = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86 CPUs")
@pytest.mark.parametrize(
    ("cpu", "features", "level"),
    [
        ("cascadelake", AVX512, "avx512_vnni"),
        ("haswell", "avx2,fma,f16c", "avx2"),
        ("ivybridge", "f16c", "generic"),
    ],
)
def test_no_cpu_gets_calls_of_a_library_that_is_not_there(
    cpu: str, features: str, level: str
) -> None:
    """Code for CPUs that this one is not, looked at and not run: rounding must be instructions."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, cpu, features],
        env={**os.environ, capability.VARIABLE: level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [level, []]
