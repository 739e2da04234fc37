"""Whether a class keeps the contract of its kind, as far as can be seen without running it.

A method inherited from the Protocol itself counts as missing: its body is `...` and returns None.
"""

from __future__ import annotations

import inspect
from typing import Any

from headrace.errors import PluginError


def check_class(label: str, protocol: type[Any], cls: type[Any], source: str) -> None:
    """Raise PluginError where `cls` lacks a method or attribute of `protocol`, or takes other arguments."""
    where = f"{label} {cls.__module__}:{cls.__qualname__} ({source})"
    for attribute in _class_attributes(protocol):
        if not hasattr(cls, attribute):
            raise PluginError(f"{where} has no class attribute `{attribute}`")
    missing = [name for name in _methods(protocol) if not _has_own(cls, protocol, name)]
    if missing:
        wanted = "; ".join(_signature(protocol, name) for name in missing)
        raise PluginError(f"{where} lacks {', '.join(missing)}. The contract asks for {wanted}")
    for name in _methods(protocol):
        _check_method(where, protocol, cls, name)


def _methods(protocol: type[Any]) -> list[str]:
    return [
        name
        for name, member in vars(protocol).items()
        if not name.startswith("_")
        and isinstance(member, (staticmethod, classmethod, type(_methods)))
    ]


def _class_attributes(protocol: type[Any]) -> list[str]:
    annotations = inspect.get_annotations(protocol)
    return [name for name, hint in annotations.items() if "ClassVar[" in str(hint)]


def _has_own(cls: type[Any], protocol: type[Any], name: str) -> bool:
    member = inspect.getattr_static(cls, name, None)
    return member is not None and member is not inspect.getattr_static(protocol, name)


def _signature(protocol: type[Any], name: str) -> str:
    return f"{name}({', '.join(_parameters(protocol, name))})"


def _parameters(protocol: type[Any], name: str) -> list[str]:
    """Return the names of what the caller passes."""
    parameters = list(inspect.signature(getattr(protocol, name)).parameters)
    is_bound = isinstance(inspect.getattr_static(protocol, name), (classmethod, staticmethod))
    return parameters if is_bound else parameters[1:]


def _keyword_only(protocol: type[Any], name: str) -> list[str]:
    """Return the names of what the caller passes by keyword."""
    parameters = inspect.signature(getattr(protocol, name)).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _check_method(where: str, protocol: type[Any], cls: type[Any], name: str) -> None:
    method = getattr(cls, name)
    if not callable(method):
        raise PluginError(f"{where}: `{name}` is not a method")
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise PluginError(f"{where}: {name} is async; the contract is synchronous and never waits")
    wanted = inspect.getattr_static(protocol, name)
    found = inspect.getattr_static(cls, name)
    if isinstance(wanted, classmethod) and not isinstance(found, (classmethod, staticmethod)):
        raise PluginError(f"{where}: {name} must be a @classmethod")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return
    is_bound = isinstance(found, (classmethod, staticmethod))
    by_keyword = _keyword_only(protocol, name)
    arguments: list[Any] = [] if is_bound else [None]
    arguments += [word for word in _parameters(protocol, name) if word not in by_keyword]
    try:
        signature.bind(*arguments, **dict.fromkeys(by_keyword))
    except TypeError as error:
        raise PluginError(
            f"{where}: {name}{signature} cannot be called as {_signature(protocol, name)}: {error}"
        ) from None
