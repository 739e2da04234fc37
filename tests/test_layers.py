"""An import that climbs a layer is a failing test. The table is the architecture's, as data."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterable

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

CORE = (
    "headrace.types",
    "headrace.interfaces",
    "headrace.errors",
    "headrace.logs",
    "headrace.prefix_hash",
    "headrace.step_time",
    "headrace.policy_answers",
    "headrace.policy_guard",
    "headrace.policy_watchdog",
    "headrace.cache",
    "headrace.clock",
    "headrace.group",
    "headrace.heap",
    "headrace.plugins.hookspecs",
    "headrace",  # the package itself: public names, resolved on first use
)
TEXT = ("headrace.text",)
PLUGIN_SYSTEM = ("headrace.plugins", "headrace.config")
BELOW_ROOMS = CORE + TEXT
TOP = (
    "headrace.cli",
    "headrace.server",
    "headrace.llm",
    "headrace.worker",
    "headrace.build",
    "headrace.load",
    "headrace.simulator",
    "headrace.testing",
)

# package -> the headrace packages it may import (its own is always allowed)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **{name: CORE for name in CORE if name != "headrace"},
    "headrace.text": CORE,
    "headrace.engine": BELOW_ROOMS,
    "headrace.models": BELOW_ROOMS,
    "headrace.policies": BELOW_ROOMS,
    "headrace.backends": BELOW_ROOMS,
    "headrace.plugins": CORE,
    "headrace.config": (*CORE, "headrace.plugins"),
    "headrace.gateway": (*BELOW_ROOMS, "headrace.config", "headrace.engine.client"),
}

CORE_LIBRARIES = {"pluggy", "msgspec", "structlog"}
LIBRARIES = {
    **{name: CORE_LIBRARIES for name in CORE},
    "headrace.text": CORE_LIBRARIES | {"tokenizers", "jinja2"},
    "headrace.plugins": CORE_LIBRARIES,
    "headrace.config": CORE_LIBRARIES | {"yaml"},
    "headrace.policies": CORE_LIBRARIES | {"numpy"},
    "headrace.engine": CORE_LIBRARIES | {"numpy", "anyio"},
    "headrace.models": CORE_LIBRARIES
    | {"numpy", "huggingface_hub", "tokenizers", "safetensors", "rich"},
    "headrace.backends": CORE_LIBRARIES | {"numpy", "torch", "numba", "llvmlite", "cupy", "cuda"},
    "headrace.gateway": CORE_LIBRARIES
    | {
        "anyio",
        "starlette",
        "httpx",
        "httpx_aiohttp",
        "aiohttp",
        "prometheus_client",
        "uvicorn",
        "httptools",
        "redis",  # inside functions, where limits are counted there
        "opentelemetry",  # inside functions, where spans are configured
        "tokenizers",
        "jinja2",
    },
}


def modules() -> list[tuple[str, pathlib.Path]]:
    found = []
    for folder in (
        "headrace",
        "text",
        "gateway",
        "engine",
        "models",
        "backends",
        "policies",
        "plugins",
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = list(file.relative_to(ROOT).with_suffix("").parts)
            if parts[0] != "headrace":
                parts.insert(0, "headrace")
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), file))
    return found


def owner(module: str, names: Iterable[str]) -> str | None:
    fits = [name for name in names if module == name or module.startswith(name + ".")]
    return max(fits, key=len) if fits else None


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                inside.update(ast.walk(child))
    return inside


def imports(file: pathlib.Path) -> list[tuple[str, bool]]:
    """Return (module, only for type checking) for every import of the file."""
    tree = ast.parse(file.read_text())
    typing_only = type_checking_nodes(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node in typing_only))
    return found


def test_no_import_climbs() -> None:
    wrong = []
    for module, file in modules():
        me = owner(module, MAY_IMPORT)
        if me is None:
            continue
        for name, _ in imports(file):
            if name.split(".")[0] != "headrace":
                continue
            allowed = MAY_IMPORT[me]
            if name == "headrace" or name == me or name.startswith(me + "."):
                continue
            target = owner(name, tuple(n for n in allowed if n != "headrace"))
            if target is None:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_each_layer_uses_its_own_libraries_only() -> None:
    wrong = []
    for module, file in modules():
        me = owner(module, tuple(n for n in LIBRARIES if n != "headrace"))
        if me is None:
            continue
        for name, typing_only in imports(file):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "headrace" or typing_only:
                continue
            if top not in LIBRARIES[me]:
                wrong.append(f"{module} imports {top}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["headrace.gateway.app", "headrace.engine.client", "headrace.server"]
)
def test_gateway_loads_without_the_heavy_libraries(module: str) -> None:
    heavy = ("torch", "numpy", "numba", "aiohttp", "httpx", "opentelemetry")
    code = f"import {module}, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
