"""The configuration as a tree whose every value knows where it was written.

A YAML file is composed into nodes, not loaded: PyYAML's loader forgets lines and lets the second of
two equal keys win in silence.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

from headrace.errors import ConfigError
from headrace.plugins.values import Value, show

_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")
)
_SURPRISING_NUMBER = re.compile(r"[+-]?0\d+|.*:.*")
_MAX_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something was written, and the folder its relative paths count from."""

    text: str
    folder: pathlib.Path


@dataclass(slots=True)
class Scalar:
    value: Value
    origin: Origin


@dataclass(slots=True)
class Items:
    entries: list[Node]
    origin: Origin


@dataclass(slots=True)
class Table:
    entries: dict[str, Node]
    origin: Origin
    key_origins: dict[str, Origin] = field(default_factory=dict)


Node = Scalar | Items | Table


def config_error(origin: Origin, key: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{origin.text}, key {key}: {problem}" if key else f"{origin.text}: {problem}"
    )


def plain(node: Node) -> Any:
    """Return the node's value without origins."""
    if isinstance(node, Scalar):
        return node.value.value
    if isinstance(node, Items):
        return [plain(entry) for entry in node.entries]
    return {key: plain(entry) for key, entry in node.entries.items()}


def native(data: Any, origin: Origin) -> Node:
    """Return Python data as a tree."""
    if isinstance(data, dict):
        entries = {str(key): native(entry, origin) for key, entry in data.items()}
        return Table(entries, origin, dict.fromkeys(entries, origin))
    if isinstance(data, (list, tuple)):
        return Items([native(entry, origin) for entry in data], origin)
    return Scalar(Value(data, "native"), origin)


def read_file(path: pathlib.Path) -> Table:
    """Return the tree of a YAML file. ConfigError where it cannot be read or is no YAML table."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    node = compose(text, str(path), path.resolve().parent)
    if node is None or (isinstance(node, Scalar) and node.value.value is None):
        return Table({}, Origin(str(path), path.resolve().parent))
    if not isinstance(node, Table):
        raise config_error(node.origin, "", "the file must hold a table of keys, such as `models:`")
    return node


def compose(text: str, name: str, folder: pathlib.Path, has_lines: bool = True) -> Node | None:
    """Return the tree of a YAML text; None where it is empty."""
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}" if mark and has_lines else name
        context = f" ({error.context})" if error.context else ""
        raise ConfigError(f"{where}: not valid YAML: {error.problem}{context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    if document is None:
        return None
    return _Composer(name, folder, has_lines).node(document, "")


def _is_surprising(source: yaml.ScalarNode) -> bool:
    """Say whether YAML 1.1 reads a number or date that its writer did not mean: 1:30, 010, 2026-01-02."""
    kind = source.tag.rpartition(":")[2]
    if kind in ("int", "float"):
        return _SURPRISING_NUMBER.fullmatch(source.value) is not None
    return kind == "timestamp"


class _Composer:
    """Turns PyYAML's nodes into ours, once per document."""

    def __init__(self, name: str, folder: pathlib.Path, has_lines: bool) -> None:
        self._name = name
        self._folder = folder
        self._has_lines = has_lines
        self._scalars = yaml.SafeLoader("")
        self._open: set[int] = set()
        self._count = 0

    def node(self, source: yaml.Node, key: str) -> Node:
        origin = self._origin(source)
        self._count += 1
        if id(source) in self._open:
            raise config_error(origin, key, "an alias that contains itself")
        if self._count > _MAX_NODES:
            raise config_error(origin, key, f"more than {_MAX_NODES} values, aliases written out")
        if isinstance(source, yaml.ScalarNode):
            return Scalar(Value(self._scalar(source, origin, key)), origin)
        self._open.add(id(source))
        try:
            if isinstance(source, yaml.SequenceNode):
                entries = [
                    self.node(entry, f"{key}.{index}" if key else str(index))
                    for index, entry in enumerate(source.value)
                ]
                return Items(entries, origin)
            assert isinstance(source, yaml.MappingNode)
            return self._table(source, origin, key)
        finally:
            self._open.remove(id(source))

    def _table(self, source: yaml.MappingNode, origin: Origin, key: str) -> Table:
        table = Table({}, origin)
        for name_node, value_node in source.value:
            name_origin = self._origin(name_node)
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
            if not isinstance(name, str) or name_node.tag == "tag:yaml.org,2002:merge":
                raise config_error(
                    name_origin, key, "a key must be a plain name, not a list, table or <<"
                )
            path = f"{key}.{name}" if key else name
            if name in table.entries:
                first = table.key_origins[name].text
                raise config_error(name_origin, path, f"written twice; the first is at {first}")
            table.entries[name] = self.node(value_node, path)
            table.key_origins[name] = name_origin
        return table

    def _scalar(self, source: yaml.ScalarNode, origin: Origin, key: str) -> Hashable:
        if source.style is None and _is_surprising(source):
            return str(source.value)
        if source.tag not in _PLAIN_TAGS:
            raise config_error(origin, key, f"the YAML tag {source.tag} is not allowed")
        try:
            value: Hashable = self._scalars.construct_object(source)
        except (ValueError, KeyError, yaml.YAMLError):
            raise config_error(
                origin, key, f"{show(source.value)} is not a {source.tag[18:]}"
            ) from None
        return value

    def _origin(self, source: yaml.Node) -> Origin:
        line = f", line {source.start_mark.line + 1}" if self._has_lines else ""
        return Origin(f"{self._name}{line}", self._folder)
