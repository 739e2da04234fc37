"""Folder X/ at the root is the package headrace.X, and the package list says so."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
NOT_PACKAGED = {"tests", "docs", "benchmarks", "scripts", "configs", "build", "dist"}


def folders_with_code() -> set[str]:
    found = set()
    for top in ROOT.iterdir():
        if top.name.startswith(".") or top.name in NOT_PACKAGED or not top.is_dir():
            continue
        if top.name.endswith(".egg-info"):
            continue
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "headrace" else ("headrace", *parts)))
    return found


def test_every_package_is_listed() -> None:
    assert set(SETUPTOOLS["packages"]) == folders_with_code()


def test_every_python_folder_is_a_package() -> None:
    for file in ROOT.rglob("*.py"):
        top = file.relative_to(ROOT).parts[0]
        if top in NOT_PACKAGED or top.startswith("."):
            continue
        assert (file.parent / "__init__.py").exists(), f"{file.parent} has code but no __init__.py"


def test_top_level_folders_are_mapped() -> None:
    mapped = {name for name in SETUPTOOLS["package-dir"] if name.count(".") == 1}
    listed = {".".join(name.split(".")[:2]) for name in SETUPTOOLS["packages"] if "." in name}
    inside = {f"headrace.{path.name}" for path in (ROOT / "headrace").iterdir() if path.is_dir()}
    assert mapped == listed - inside


def test_banned_imports_name_every_mapped_folder() -> None:
    banned = CONFIG["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    folders = {folder for folder in SETUPTOOLS["package-dir"].values() if folder != "headrace"}
    assert set(banned) == folders


@pytest.mark.parametrize(
    "statement", ["import headrace", "import headrace.types, headrace.interfaces"]
)
def test_import_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in HEAVY if m in sys.modules])"
    code = "HEAVY = ('torch', 'numpy', 'numba', 'tokenizers', 'starlette', 'jinja2'); " + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_package_init_loads_nothing_heavy() -> None:
    imports = ", ".join(SETUPTOOLS["packages"])
    code = f"import sys, {imports}; print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dependencies_are_documented() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    declared = list(CONFIG["project"]["dependencies"])
    for extra in CONFIG["project"]["optional-dependencies"].values():
        declared += extra
    for requirement in declared:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()
        assert f"`{name}`" in text, f"docs/dependencies.md says nothing of {name}"


def test_runtime_imports_are_declared() -> None:
    """Every third-party module that packaged code imports belongs to a dependency or an extra."""
    providers = importlib.metadata.packages_distributions()
    extras = CONFIG["project"]["optional-dependencies"]
    optional = [item for name, items in extras.items() if name != "dev" for item in items]
    declared = {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-")
        for requirement in [*CONFIG["project"]["dependencies"], *optional]
    }
    pattern = re.compile(r"^\s*(?:import|from)\s+([A-Za-z_][A-Za-z0-9_]*)", re.M)
    allowed = {"headrace", "llvmlite"}  # llvmlite is part of numba's interface
    for package in SETUPTOOLS["packages"]:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        for file in pathlib.Path(next(iter(spec.submodule_search_locations))).glob("*.py"):
            for module in set(pattern.findall(file.read_text())) - allowed:
                if module in sys.stdlib_module_names or module not in providers:
                    continue
                owners = {name.lower().replace("_", "-") for name in providers[module]}
                assert owners & declared, f"{file} imports {module}, which is not declared"
