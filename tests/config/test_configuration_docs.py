"""docs/configuration.md has every key with its type, default and meaning, as the schema says."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import textwrap
import typing
from typing import Any

import msgspec
import pytest

from headrace.config import Choice, Config, load_config
from headrace.config.load import keys_of
from headrace.config.render import scalar_text
from headrace.plugins.values import describe

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
TEXT = DOCS.read_text()


def meanings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a struct."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            found[ast.unparse(field.target)] = str(ast.literal_eval(following.value))
    return found


def rows(cls: type[Any] = Config, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return (key, type, default, meaning) of every key, in order."""
    found: list[tuple[str, str, str, str]] = []
    defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
    for name, hint in keys_of(cls).items():
        key, meaning = f"{prefix}{name}", meanings(cls).get(name, "")
        default: Any = defaults[name]
        element = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        if hint is Choice:
            found.append((key, "a plugin", default.use, meaning))
        elif element is Choice:
            found.append(
                (key, "a list of plugins", f"[{', '.join(c.use for c in default)}]", meaning)
            )
        elif isinstance(element, type) and issubclass(element, msgspec.Struct):
            found += rows(element, f"{key}.N.")
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += rows(hint, f"{key}.")
        else:
            text = "from the source" if key == "models.N.name" else scalar_text(default, hint)
            found.append((key, describe(hint), text, meaning))
            listed = element_of_union(hint)
            if listed is not None:
                found += rows(listed, f"{key}.N.")
    return found


def element_of_union(hint: Any) -> type[Any] | None:
    """Return what a list of structs that is one of several forms has for entries."""
    for member in typing.get_args(hint):
        if typing.get_origin(member) is tuple:
            element = typing.get_args(member)[0]
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                return element
    return None


def test_every_key_has_a_meaning() -> None:
    assert [key for key, _, _, meaning in rows() if not meaning] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_key_is_documented(row: tuple[str, str, str, str]) -> None:
    key, kind, default, meaning = row
    assert f"| `{key}` | {kind} | `{default}` | {meaning} |\n" in TEXT


def test_no_key_is_documented_that_does_not_exist() -> None:
    documented = re.findall(r"^\| `([a-zA-Z_.]+)` \|", TEXT, re.M)
    assert documented == [row[0] for row in rows()]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_examples_load(block: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "headrace.yaml").write_text(block)
    load_config(tmp_path / "headrace.yaml", environ={})


def test_the_error_shown_is_the_error_given(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = blocks("text")
    assert shown
    monkeypatch.chdir(tmp_path)
    pathlib.Path("headrace.yaml").write_text(
        "models:\n  - source: smollm2\n    engine:\n      max_modl_len: 2048\n"
    )
    with pytest.raises(Exception) as caught:
        load_config(pathlib.Path("headrace.yaml"), environ={})
    assert str(caught.value) == " ".join(shown[0].split())


def test_the_variables_shown_reach_their_keys() -> None:
    table = re.findall(r"^\| `(HEADRACE_\w+)=(.*?)` \| `(.*?)` \|$", TEXT, re.M)
    assert len(table) >= 3
    for variable, value, key in table:
        loaded = load_config(None, environ={variable: value})
        assert loaded.origins[key] == f"environment variable {variable}"
