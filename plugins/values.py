"""Turning one value into the type a field declares, with words for what was expected.

Shared by the configuration and by the `Options` of plugins, so that both take the same spellings.
"""

from __future__ import annotations

import math
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.types.units import Bounds, Unit, format_duration, parse_duration, parse_size

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_LARGEST = 2**63 - 1
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS_OF_TEXT = _WORDS | {"1": True, "0": False}

Form = Literal["yaml", "text", "native"]


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where its type comes from.

    "yaml": YAML chose the type. "text": an environment variable or a flag, which has none.
    "native": Python code passed it, so that a bare number may be a duration in seconds.
    """

    value: Any
    form: Form = "yaml"


def describe(hint: Any) -> str:
    """Return in words what a field of this type takes, such as "a whole number of at least 1"."""
    hint, marks = _unpack(hint)
    unit = next((mark.kind for mark in marks if isinstance(mark, Unit)), None)
    bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds())
    if unit == "size":
        return "a size such as 2GiB"
    if unit == "duration":
        least = f" of at least {format_duration(bounds.low)}" if bounds.low is not None else ""
        return f"a duration{least} such as 500ms"
    if typing.get_origin(hint) is Literal:
        choices = [str(choice) for choice in typing.get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if _is_union(hint):
        return " or ".join(describe(member) for member in typing.get_args(hint))
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
        pathlib.Path: "a path",
    }
    if hint in words:
        return words[hint] + _describe_bounds(bounds)
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, list, frozenset, Sequence):
        arguments = [a for a in typing.get_args(hint) if a is not Ellipsis]
        return f"a list, each entry {describe(arguments[0])}" if arguments else "a list"
    if origin in (dict, Mapping) or hasattr(origin, "__struct_fields__"):
        return "a table"
    return str(hint)


def convert(value: Value, hint: Any) -> Any:
    """Return the value as `hint` declares it. ValueError, saying what was expected, where it cannot be."""
    declared = hint
    hint, marks = _unpack(hint)
    if hint is Any:
        return value.value
    if _is_union(hint):
        return _convert_union(value, hint)
    for mark in marks:
        if isinstance(mark, Unit):
            return _bounded(_convert_quantity(value, hint, mark), value, declared)
    if typing.get_origin(hint) is Literal:
        return _convert_literal(value, hint)
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, list, frozenset, Sequence):
        return _convert_list(value, hint, origin)
    if origin in (dict, Mapping):
        return _convert_table(value, hint)
    return _bounded(_convert_scalar(value, hint, declared), value, declared)


def show(value: Any) -> str:
    """Return a value as an error message quotes it: short, and on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unpack(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is typing.Annotated:
        inner, *marks = typing.get_args(hint)
        return inner, tuple(marks)
    return hint, ()


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _describe_bounds(bounds: Bounds) -> str:
    low, high = bounds.low, bounds.high
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if low is not None:
        return f" of at least {low:g}"
    return f" of at most {high:g}" if high is not None else ""


def _bounded(converted: Any, value: Value, declared: Any) -> Any:
    for mark in _unpack(declared)[1]:
        if isinstance(mark, Bounds) and not _inside(converted, mark):
            raise _refuse(value, declared)
    return converted


def _inside(number: float, bounds: Bounds) -> bool:
    low = -math.inf if bounds.low is None else bounds.low
    high = math.inf if bounds.high is None else bounds.high
    return low <= number <= high


def _refuse(value: Value, hint: Any, remedy: str = "") -> ValueError:
    return ValueError(f"must be {describe(hint)}, got {show(value.value)}{remedy}")


def _convert_union(value: Value, hint: Any) -> Any:
    for member in typing.get_args(hint):
        try:
            return convert(value, member)
        except ValueError:
            continue
    raise _refuse(value, hint)


def _convert_literal(value: Value, hint: Any) -> Any:
    for choice in typing.get_args(hint):
        if value.value == choice and type(value.value) is type(choice):
            return choice
        if value.form == "text" and value.value == str(choice):
            return choice
    raise _refuse(value, hint)


def _convert_quantity(value: Value, hint: Any, unit: Unit) -> Any:
    given = value.value
    marked = typing.Annotated[hint, unit]
    if isinstance(given, str):
        try:
            parsed = parse_size(given) if unit.kind == "size" else parse_duration(given)
        except ValueError as error:
            raise ValueError(f"must be {error}, got {show(given)}") from None
        return _fitting(parsed, value)
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or given < 0 or not math.isfinite(given):
        raise _refuse(value, marked)
    if unit.kind == "size":
        if isinstance(given, float):
            raise _refuse(value, marked)
        return _fitting(given, value)
    if value.form != "native" and given != 0:
        raise _refuse(value, marked, f"; say the unit, such as {given}s or {given}ms")
    return float(given)


def _convert_scalar(value: Value, hint: Any, declared: Any) -> Any:
    given = value.value
    if hint is str:
        if not isinstance(given, str):
            quoted = f"; write it in quotes: '{given}'" if isinstance(given, (int, float)) else ""
            raise _refuse(value, declared, quoted)
        return given
    if hint is pathlib.Path:
        if isinstance(given, (str, pathlib.Path)):
            return pathlib.Path(given).expanduser()
        raise _refuse(value, declared)
    if hint is types.NoneType:
        if given is None or (value.form == "text" and given in ("null", "none", "")):
            return None
        raise _refuse(value, declared)
    if hint is bool:
        if value.form == "text" and isinstance(given, str):
            given = _WORDS_OF_TEXT.get(given.lower(), given)
        if isinstance(given, bool):
            return given
        raise _refuse(value, declared)
    if hint in (int, float):
        return _convert_number(value, hint, declared)
    raise TypeError(f"no rule turns a value into {hint!r}")


def _convert_number(value: Value, hint: Any, declared: Any) -> Any:
    given = value.value
    if isinstance(given, str):
        if hint is int and value.form == "text" and _INTEGER.fullmatch(given):
            given = _integer(value)
        if hint is float:
            try:
                given = float(given)
            except ValueError:
                raise _refuse(value, declared) from None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise _refuse(value, declared)
    if hint is int:
        if isinstance(given, float):
            raise _refuse(value, declared)
        return _fitting(given, value)
    if not math.isfinite(given):
        raise ValueError(f"must be a finite number, got {given}")
    return float(given)


def _integer(value: Value) -> int:
    try:
        return int(value.value)
    except ValueError:  # thousands of digits, which Python does not turn into a number
        raise ValueError(f"must fit 64 bits, got {show(value.value)}") from None


def _fitting(number: float, value: Value) -> Any:
    """Return a number that every process can be sent; ValueError for one beyond 64 bits."""
    if not -_LARGEST <= number <= _LARGEST:
        raise ValueError(f"must fit 64 bits, got {show(value.value)}")
    return number


def _convert_list(value: Value, hint: Any, origin: Any) -> Any:
    given = value.value
    if not isinstance(given, (list, tuple)):
        raise _refuse(value, hint)
    arguments = [argument for argument in typing.get_args(hint) if argument is not Ellipsis]
    element = arguments[0] if arguments else Any
    converted = []
    for index, entry in enumerate(given):
        try:
            converted.append(convert(Value(entry, value.form), element))
        except ValueError as error:
            raise ValueError(f"entry {index}: {error}") from None
    return tuple(converted) if origin in (tuple, Sequence) else origin(converted)


def _convert_table(value: Value, hint: Any) -> Any:
    if not isinstance(value.value, Mapping):
        raise _refuse(value, hint)
    _, element = typing.get_args(hint) or (str, Any)
    converted = {}
    for key, entry in value.value.items():
        if not isinstance(key, str):
            raise ValueError(f"its keys must be text, got {show(key)}")
        try:
            converted[key] = convert(Value(entry, value.form), element)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return converted
