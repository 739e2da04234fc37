"""From YAML file, environment and flags to one checked `Config`.

Precedence: flags over environment over file over default. The tree of nodes is walked along the
schema, so that every complaint names where the value was written.
"""

from __future__ import annotations

import os
import pathlib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.config.nodes import (
    Items,
    Node,
    Origin,
    Scalar,
    Table,
    compose,
    config_error,
    plain,
    read_file,
)
from headrace.config.overlay import expand, overlay_environment, overlay_flags
from headrace.config.replicas import check_replicas
from headrace.config.schema import Choice, Config, Derived, ModelConfig, PathLike
from headrace.errors import did_you_mean
from headrace.plugins.values import Value, convert, describe, show

_REMOTE_SOURCE = re.compile(r"(hf|pkg):")
_MODEL_NAME = re.compile(r"[^\s/][^\s]*")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective configuration and, for every dotted key, where its value came from."""

    config: Config
    origins: Mapping[str, str]


def load_config(
    path: pathlib.Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Return the effective configuration. ConfigError names file, line, key and the nearest valid key.

    `flags` are dotted keys ("models.0.engine.max_model_len"); text is read like an environment
    variable's, and None counts as not given.
    """
    here = pathlib.Path.cwd()
    tree = Table({}, Origin("default", here)) if path is None else read_file(path)
    top_keys = keys_of(Config)
    overlay_environment(tree, os.environ if environ is None else environ, top_keys, here)
    overlay_flags(tree, flags or {}, here)
    walk = _Walk()
    config = walk.struct(tree, Config, "")
    base_dir = here if path is None else path.resolve().parent
    config = msgspec.structs.replace(
        config, base_dir=str(base_dir), models=walk.named(config.models)
    )
    check_replicas(config, walk.origins)
    return LoadedConfig(config, walk.origins)


T = TypeVar("T", bound=msgspec.Struct)


def load_table(path: pathlib.Path, cls: type[T]) -> tuple[T, Mapping[str, str]]:
    """Return another YAML file as a struct, and for every dotted key where it was written.

    ConfigError names file, line, key and the nearest valid key.
    """
    walk = _Walk()
    table: T = walk.struct(read_file(path), cls, "")
    return table, walk.origins


class _Walk:
    """One pass over the tree, collecting the origin of every value."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}

    def struct(self, node: Node, cls: type[Any], key: str) -> Any:
        node = self._table_for(node, cls, key)
        hints = keys_of(cls)
        for name in node.entries:
            if name not in hints:
                origin = node.key_origins.get(name, node.origin)
                raise config_error(
                    origin, _join(key, name), f"unknown key. {did_you_mean(name, hints)}"
                )
        values = {}
        for name, hint in hints.items():
            path = _join(key, name)
            if name in node.entries and not _is_null(node.entries[name]):
                values[name] = self.value(node.entries[name], hint, path)
            else:
                self._defaults(cls, name, path, node)
        return cls(**values)

    def value(self, node: Node, hint: Any, key: str) -> Any:
        if _is_struct(hint):
            return self.struct(node, hint, key)
        element = _struct_element(hint)
        if element is not None:
            node = expand(node)
            if not isinstance(node, Items) and typing.get_origin(hint) is not tuple:
                return self._leaf(node, hint, key)
            if not isinstance(node, Items):
                problem = f"must be a list, got {show(plain(node))}; write a `-` before each entry"
                raise config_error(node.origin, key, problem)
            entries = [self.struct(e, element, f"{key}.{i}") for i, e in enumerate(node.entries)]
            if not entries and key.endswith(("models", "replicas")):
                raise config_error(node.origin, key, "must have at least one entry")
            return tuple(entries)
        return self._leaf(node, hint, key)

    def named(self, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        """Return the models, each with a name of its own."""
        named: dict[str, int] = {}
        result = []
        for index, model in enumerate(models):
            key = f"models.{index}.name"
            if not model.name:
                self.origins[key] = f"default (from models.{index}.source)"
                model = msgspec.structs.replace(model, name=_default_name(model))
            origin = Origin(self.origins.get(key, "default"), pathlib.Path())
            if not _MODEL_NAME.fullmatch(model.name):
                raise config_error(origin, key, f"must have no spaces, got {model.name!r}")
            if model.name in named:
                other = f"models.{named[model.name]}.name"
                where = self.origins.get(other, "default")
                problem = (
                    f"{model.name!r} is already the name of another model ({where}, key {other})"
                )
                raise config_error(origin, key, problem)
            named[model.name] = index
            result.append(model)
        return tuple(result)

    def _table_for(self, node: Node, cls: type[Any], key: str) -> Table:
        node = expand(node)
        if isinstance(node, Table):
            return node
        if cls is Choice and isinstance(node, Scalar) and isinstance(node.value.value, str):
            return Table({"use": node}, node.origin, {"use": node.origin})
        keys = ", ".join(keys_of(cls))
        problem = f"must be a table with the keys {keys}, got {show(plain(node))}"
        raise config_error(node.origin, key, problem)

    def _leaf(self, node: Node, hint: Any, key: str) -> Any:
        bare, marks = _unmarked(hint)
        if not isinstance(node, Scalar) or typing.get_origin(bare) in (dict, tuple):
            node = expand(node)
        if typing.get_origin(bare) is dict:
            node = _typed(node)
        form = node.value.form if isinstance(node, Scalar) else "yaml"
        try:
            value = convert(Value(plain(node), form), hint)
        except ValueError as error:
            raise config_error(node.origin, key, str(error)) from None
        for mark in marks:
            if isinstance(mark, PathLike) and (value or mark.kind != "file"):
                if not value:
                    raise config_error(node.origin, key, f"must be {describe(hint)}, got nothing")
                value = _absolute(value, mark, node.origin.folder)
        self._note(node, key)
        return value

    def _note(self, node: Node, key: str) -> None:
        if isinstance(node, Table) and node.entries:
            for name, entry in node.entries.items():
                self._note(entry, _join(key, name))
        else:
            self.origins[key] = node.origin.text

    def _defaults(self, cls: type[Any], name: str, key: str, node: Table) -> None:
        field = next(field for field in msgspec.structs.fields(cls) if field.name == name)
        if field.required:
            raise config_error(node.origin, key, "is missing")
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        self._note_default(default, key)

    def _note_default(self, value: Any, key: str) -> None:
        if isinstance(value, msgspec.Struct):
            for field in value.__struct_fields__:
                self._note_default(getattr(value, field), _join(key, field))
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            for index, entry in enumerate(value):
                self._note_default(entry, f"{key}.{index}")
        elif not isinstance(value, dict):
            self.origins[key] = "default"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def keys_of(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a struct that are keys of the YAML, with their types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: hint
        for name, hint in hints.items()
        if name in cls.__struct_fields__
        and not any(isinstance(m, Derived) for m in _unmarked(hint)[1])
    }


def _unmarked(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is typing.Annotated:
        bare, *marks = typing.get_args(hint)
        return bare, tuple(marks)
    return hint, ()


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _struct_element(hint: Any) -> type[Any] | None:
    """Return what a list of structs, or a union with one, has for entries."""
    for member in (hint, *typing.get_args(hint)):
        if typing.get_origin(member) is tuple and _is_struct(typing.get_args(member)[0]):
            element: type[Any] = typing.get_args(member)[0]
            return element
    return None


def _typed(node: Node) -> Node:
    """Return a free table with texts from environment and flags read as YAML, which gives them types."""
    if isinstance(node, Table):
        entries = {name: _typed(entry) for name, entry in node.entries.items()}
        return Table(entries, node.origin, node.key_origins)
    if isinstance(node, Scalar) and node.value.form == "text":
        origin = node.origin
        return compose(str(node.value.value), origin.text, origin.folder, has_lines=False) or node
    return node


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value.value is None


def _absolute(text: str, mark: PathLike, folder: pathlib.Path) -> str:
    """Return `text` with the path it holds, if any, made absolute."""
    if mark.kind == "use":
        path, colon, name = text.rpartition(":")
        return f"{_resolve(path, folder)}:{name}" if colon and path.endswith(".py") else text
    if mark.kind == "file":
        return _resolve(text, folder)
    if text.startswith("scripted:"):
        return "scripted:" + _resolve(text.removeprefix("scripted:"), folder)
    if _REMOTE_SOURCE.match(text):
        return text
    looks_like_path = "/" in text or text.startswith(("~", ".")) or text.endswith(".gguf")
    if looks_like_path or (folder / text).exists():
        return _resolve(text, folder)
    return text


def _resolve(path: str, folder: pathlib.Path) -> str:
    return os.path.normpath(folder / pathlib.Path(path).expanduser())


def _default_name(model: ModelConfig) -> str:
    if model.is_remote:
        return next((entry.model for entry in model.replica_entries if entry.model), "")
    return _name_of(model.source)


def _name_of(source: str) -> str:
    """Return the name a model goes by when the configuration gives it none."""
    kind, _, rest = source.partition(":")
    if kind == "pkg":
        return rest
    if kind == "hf":
        return rest.split("@")[0].split(":")[0].rpartition("/")[2]
    path = pathlib.Path(rest if kind == "scripted" else source)
    return (path.stem if path.suffix in (".gguf", ".json") else path.name) or "model"
