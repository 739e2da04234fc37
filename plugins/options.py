"""Checking a YAML table of options against a class's inner `Options` dataclass.

Fields may be int, float, bool, str, Literal, optional, tuples and tables of these, pathlib.Path
(relative ones count from the YAML file), and headrace.types.units.Bytes and Seconds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from headrace.errors import PluginError, did_you_mean
from headrace.plugins.values import Value, convert, describe


def build_options(
    cls: type[Any], options: Mapping[str, Any] | None, base_dir: pathlib.Path = pathlib.Path()
) -> Any | None:
    """Return an instance of `cls.Options`, or None where the class has none.

    PluginError names the option, what it takes, and the nearest known one for an unknown name.
    """
    given = dict(options or {})
    declared = getattr(cls, "Options", None)
    label = f"'{cls.name}'"
    if declared is None:
        if given:
            raise PluginError(f"{label} takes no options, got {', '.join(sorted(given))}")
        return None
    if not (isinstance(declared, type) and dataclasses.is_dataclass(declared)):
        raise PluginError(f"{label}: {cls.__qualname__}.Options must be a dataclass")
    hints = _hints(declared, label)
    values = {}
    for name, value in (_written_defaults(declared, hints) | given).items():
        if name not in hints:
            raise PluginError(f"{label} has no option '{name}'. {did_you_mean(name, hints)}")
        try:
            values[name] = _anchored(convert(Value(value), hints[name]), base_dir)
        except ValueError as error:
            raise PluginError(f"{label}: option {name} {error}") from None
        except TypeError as error:
            raise PluginError(f"{label}: {cls.__qualname__}.Options.{name}: {error}") from None
    try:
        return declared(**values)
    except TypeError as error:
        missing = [name for name in _required(declared) if name not in values]
        if missing:
            wanted = "; ".join(f"{name}: {describe(hints[name])}" for name in missing)
            raise PluginError(f"{label} needs the option {wanted}") from None
        raise PluginError(f"{label}: options refused: {error}") from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise PluginError(f"{label}: options refused: {kind}{error}") from error


def _written_defaults(declared: type[Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that are text, which are read as if YAML held them: a duration may be "5s"."""
    return {
        field.name: field.default
        for field in dataclasses.fields(declared)
        if field.name in hints and isinstance(field.default, str)
    }


def _hints(declared: type[Any], label: str) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(declared, include_extras=True)
    except NameError as error:
        raise PluginError(f"{label}: the types of its Options cannot be read: {error}") from error
    return {field.name: hints[field.name] for field in dataclasses.fields(declared) if field.init}


def _required(declared: type[Any]) -> list[str]:
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(declared)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _anchored(value: Any, base_dir: pathlib.Path) -> Any:
    if isinstance(value, pathlib.Path):
        return base_dir / value
    if isinstance(value, tuple):
        return tuple(_anchored(entry, base_dir) for entry in value)
    return value
