"""Laying environment variables and flags over the file, each at its dotted key.

A variable's or flag's text has no type of its own: it is kept as written until the schema says what
is expected, so that HEADRACE_MODELS__0__NAME=7 is a name and HEADRACE_GATEWAY__PORT=7 a number.
"""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.config.nodes import (
    Items,
    Node,
    Origin,
    Scalar,
    Table,
    compose,
    config_error,
    native,
)
from headrace.errors import ConfigError, did_you_mean
from headrace.plugins.values import Value

PREFIX = "HEADRACE_"


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Turn `--set KEY=VALUE` arguments into flags. ConfigError where one has no `=`."""
    flags: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {assignment}: write KEY=VALUE, such as models.0.engine.max_model_len=2048"
            )
        flags[key.strip()] = value
    return flags


def overlay_environment(
    tree: Table, environ: Mapping[str, str], top_keys: Iterable[str], folder: pathlib.Path
) -> None:
    """Lay every HEADRACE_<KEY> over the tree. An empty value counts as not set."""
    known = set(top_keys)
    found: list[tuple[int, str, list[str], str]] = []
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        path = variable[len(PREFIX) :].lower().split("__")
        if path[0] in known:
            found.append((len(path), variable, path, text))
        elif len(path) > 1 or difflib.get_close_matches(path[0], known, n=1, cutoff=0.8):
            raise ConfigError(
                f"environment variable {variable}: no key {'.'.join(path)!r}. "
                + did_you_mean(path[0], known)
            )
    for _, variable, path, text in sorted(found):
        origin = Origin(f"environment variable {variable}", folder)
        _set(tree, path, Scalar(Value(text, "text"), origin), origin)


def overlay_flags(tree: Table, flags: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Lay dotted keys over the tree; a value of None counts as not given."""
    for key, value in sorted(flags.items(), key=lambda item: item[0].count(".")):
        if value is None:
            continue
        origin = Origin("command line", folder)
        node = (
            Scalar(Value(value, "text"), origin)
            if isinstance(value, str)
            else native(value, origin)
        )
        _set(tree, key.split("."), node, origin)


def expand(node: Node) -> Node:
    """Return a text where a table or list is expected as the YAML it holds."""
    if isinstance(node, Scalar) and node.value.form == "text" and isinstance(node.value.value, str):
        inner = compose(node.value.value, node.origin.text, node.origin.folder, has_lines=False)
        if isinstance(inner, (Items, Table)):
            return inner
    return node


def _set(tree: Table, path: list[str], node: Node, origin: Origin) -> None:
    here: Node = tree
    for depth, part in enumerate(path):
        key = ".".join(path[: depth + 1])
        if not part:
            raise config_error(origin, ".".join(path), "an empty part in a dotted key")
        last = depth == len(path) - 1
        following = node if last else _container(path[depth + 1], origin)
        if isinstance(here, Items):
            index = _index(here, part, key, origin)
            if index == len(here.entries):
                here.entries.append(following)
            elif last:
                here.entries[index] = node
            else:
                here.entries[index] = _opened(here.entries[index], path[depth + 1], key, origin)
            here = here.entries[index]
            continue
        assert isinstance(here, Table)
        if last or part not in here.entries:
            here.entries[part] = following
            here.key_origins[part] = origin
        else:
            here.entries[part] = _opened(here.entries[part], path[depth + 1], key, origin)
        here = here.entries[part]


def _container(next_part: str, origin: Origin) -> Node:
    return Items([], origin) if next_part.isdecimal() else Table({}, origin)


def _opened(node: Node, next_part: str, key: str, origin: Origin) -> Node:
    """Return `node` as something that has parts; `routing: name` becomes {use: name}."""
    node = expand(node)
    if isinstance(node, Scalar):
        if next_part in ("use", "options"):
            return Table({"use": node}, node.origin, {"use": node.origin})
        if node.value.value is None:
            return _container(next_part, origin)
        raise config_error(
            origin, f"{key}.{next_part}", f"{key} is a single value and has no parts"
        )
    return node


def _index(items: Items, part: str, key: str, origin: Origin) -> int:
    count = len(items.entries)
    if not part.isdecimal():
        raise config_error(origin, key, f"a list is numbered from 0, got {part!r}")
    if int(part) > count:
        raise config_error(
            origin, key, f"the list has {count} entries, so the next is number {count}"
        )
    return int(part)
