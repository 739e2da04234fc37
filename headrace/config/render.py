"""The effective configuration as YAML that loads again, each value with where it came from."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import yaml

from headrace.config.load import LoadedConfig, keys_of
from headrace.types.units import Unit, format_duration, format_size

_COMMENT_COLUMN = 48


def render(loaded: LoadedConfig) -> str:
    """Return the configuration as commented YAML."""
    lines = []
    for text, key in _struct(loaded.config, "", ""):
        origin = loaded.origins.get(key) if key else None
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {origin}" if origin else text)
    return "\n".join(lines) + "\n"


Line = tuple[str, str]
"""A line of YAML, and the dotted key whose origin goes beside it ("" for none)."""


def _struct(value: msgspec.Struct, key: str, indent: str) -> Iterator[Line]:
    for name, hint in keys_of(type(value)).items():
        path = f"{key}.{name}" if key else name
        if getattr(value, name) == {}:
            continue
        yield from _entry(f"{indent}{name}:", getattr(value, name), hint, path)


def _entry(head: str, value: Any, hint: Any, key: str) -> Iterator[Line]:
    indent = " " * (len(head) - len(head.lstrip()))
    if isinstance(value, msgspec.Struct):
        yield head, ""
        yield from _struct(value, key, indent + "  ")
    elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        yield head, ""
        for index, entry in enumerate(value):
            lines = list(_struct(entry, f"{key}.{index}", indent + "    "))
            first, first_key = lines[0]
            yield f"{indent}  - {first.lstrip()}", first_key
            yield from lines[1:]
    elif isinstance(value, Mapping) and value:
        yield head, ""
        for name, entry in value.items():
            yield from _entry(f"{indent}  {scalar_text(name)}:", entry, Any, f"{key}.{name}")
    else:
        yield f"{head} {scalar_text(value, hint)}", key


def scalar_text(value: Any, hint: Any = Any) -> str:
    """Return a value as YAML on one line, in the unit its type is marked with."""
    unit = _unit(hint)
    if unit == "size" and isinstance(value, int):
        return format_size(value)
    if unit == "duration" and isinstance(value, float):
        return format_duration(value)
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _unit(hint: Any) -> str | None:
    """Return the unit a field's type is marked with, inside a union too."""
    if typing.get_origin(hint) is typing.Annotated:
        for mark in typing.get_args(hint)[1:]:
            if isinstance(mark, Unit):
                return mark.kind
    for member in typing.get_args(hint):
        unit = _unit(member)
        if unit is not None:
            return unit
    return None
