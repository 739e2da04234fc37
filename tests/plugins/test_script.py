"""A policy in one file, named by path and class."""

from __future__ import annotations

import pathlib
import sys

import pytest

from headrace.errors import PluginError
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.plugins.script import load_class

SOURCE = """
from dataclasses import dataclass

class Last:
    name = "last"

    @dataclass(frozen=True)
    class Options:
        offset: int = 1

    def __init__(self, options: Options) -> None:
        self.options = options

    def choose(self, request, replicas, now):
        return replicas[-self.options.offset].id
"""


@pytest.fixture
def registries() -> Registries:
    return Registries.from_manager(create_plugin_manager(discover=False))


def test_a_script_is_found_from_the_base_folder(
    tmp_path: pathlib.Path, registries: Registries
) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "last.py").write_text(SOURCE)
    policy = registries.create("routing", "./policies/last.py:Last", {"offset": 2}, tmp_path)
    assert policy.options.offset == 2
    assert policy.name == "last"


def test_an_absolute_path_ignores_the_base_folder(
    tmp_path: pathlib.Path, registries: Registries
) -> None:
    (tmp_path / "last.py").write_text(SOURCE)
    policy = registries.create(
        "routing", f"{tmp_path}/last.py:Last", None, pathlib.Path("/nowhere")
    )
    assert policy.name == "last"


def test_a_changed_file_is_loaded_anew_beside_the_old_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "last.py"
    path.write_text("class Last:\n    version = 1\n")
    old = load_class("last.py:Last", tmp_path)
    path.write_text("class Last:\n    version = 2\n")  # same size, same second
    new = load_class("last.py:Last", tmp_path)
    assert (old.version, new.version) == (1, 2)
    assert old.__module__ != new.__module__
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("source", "use", "message"),
    [
        (SOURCE, "last.py:Lst", r"last\.py has no class 'Lst'. Did you mean 'Last'\? Known: Last"),
        (SOURCE, "last.py", r"write a script as \./file\.py:Class"),
        (SOURCE, "./last:Last", r"write a script as \./file\.py:Class"),
        (SOURCE, "missing.py:Last", r"missing\.py: cannot be read: No such file"),
        ("x = 1\nclass Last(:\n", "last.py:Last", r"last\.py, line 2: not valid Python"),
        (
            "\n\n1 / 0\n",
            "last.py:Last",
            r"last\.py, line 3: failed while loading: ZeroDivisionError",
        ),
        (
            "import sys\nsys.exit()\n",
            "last.py:Last",
            r"last\.py, line 2: failed while loading: SystemExit",
        ),
        ("class Last: pass\n", "last.py:Last", "has no class attribute `name`"),
        ("class Last:\n    name = 'last'\n", "last.py:Last", "lacks choose"),
        (SOURCE.replace('"last"', '""'), "last.py:Last", "`name` must be letters"),
        (SOURCE.replace('"last"', "3"), "last.py:Last", "`name` must be letters.*got 3"),
    ],
)
def test_what_is_wrong_with_a_script_is_said(
    tmp_path: pathlib.Path, registries: Registries, source: str, use: str, message: str
) -> None:
    (tmp_path / "last.py").write_text(source)
    with pytest.raises(PluginError, match=message):
        registries.create("routing", use, None, tmp_path)


def test_a_script_that_fails_leaves_no_module_behind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    with pytest.raises(PluginError):
        load_class("broken_policy.py:X", tmp_path)
    assert not [name for name in sys.modules if "broken_policy" in name]


def test_a_script_is_compiled_by_its_own_rules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    size: int = 0\n")
    assert load_class("own.py:Own", tmp_path).__annotations__ == {"size": int}
