"""What plugins have registered, one `Registry` per kind, checked against the kind's contract.

Built-ins are registered by reference ("module:Class") and imported when first asked for, so that
choosing one backend never imports another's libraries.
"""

from __future__ import annotations

import importlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pluggy

from headrace.errors import PluginError, did_you_mean
from headrace.interfaces import (
    AdmissionPolicy,
    Backend,
    EvictionPolicy,
    ModelArchitecture,
    QuantizationPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from headrace.plugins.contract import check_class
from headrace.plugins.hookspecs import ClassReference
from headrace.plugins.options import build_options
from headrace.plugins.script import is_script, load_class

KINDS: Mapping[str, type[Any]] = {
    "backends": Backend,
    "models": ModelArchitecture,
    "scheduling": SchedulingPolicy,
    "admission": AdmissionPolicy,
    "routing": RoutingPolicy,
    "eviction": EvictionPolicy,
    "quantization": QuantizationPolicy,
}
LABELS: Mapping[str, str] = {
    "backends": "backend",
    "models": "architecture",
    "scheduling": "scheduling policy",
    "admission": "admission policy",
    "routing": "routing policy",
    "eviction": "eviction policy",
    "quantization": "quantization policy",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered class: where it is and which plugin brought it."""

    name: str
    target: type[Any] | ClassReference
    origin: str

    def describe(self) -> str:
        if isinstance(self.target, ClassReference):
            return f"{self.target.target} (plugin {self.origin})"
        return f"{self.target.__module__}:{self.target.__qualname__} (plugin {self.origin})"


class Registry:
    """The classes of one kind by name. Iterating gives `Entry`s in order of name."""

    def __init__(self, kind: str, protocol: type[Any]) -> None:
        self.kind = kind
        self._protocol = protocol
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, type[Any]] = {}

    def add(self, target: type[Any] | ClassReference, origin: str) -> None:
        """Register a class, checked now, or a reference, checked when asked for. PluginError if it is wrong."""
        if not isinstance(target, ClassReference):
            check_class(LABELS[self.kind], self._protocol, target, f"plugin {origin}")
        entry = Entry(target.name, target, origin)
        _check_name(entry.describe(), entry.name)
        if entry.name in self._entries:
            raise PluginError(
                f"two classes for {self.kind} are named '{entry.name}': "
                f"{self._entries[entry.name].describe()} and {entry.describe()}. "
                "Rename one, or block its plugin with `plugins.blocked`"
            )
        self._entries[entry.name] = entry

    def get(self, name: str) -> type[Any]:
        """Return the class of this name, imported now if it was not yet."""
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._entries:
            raise PluginError(
                f"no {LABELS[self.kind]} named '{name}'. {did_you_mean(name, self._entries)}"
            )
        entry = self._entries[name]
        cls = entry.target
        if isinstance(cls, ClassReference):
            cls = _import(LABELS[self.kind], cls)
            check_class(LABELS[self.kind], self._protocol, cls, f"plugin {entry.origin}")
            if cls.name != name:
                raise PluginError(
                    f"{entry.describe()} is registered as '{name}' but its name is '{cls.name}'"
                )
        self._loaded[name] = cls
        return cls

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return (self._entries[name] for name in self.names())


@dataclass(frozen=True, slots=True)
class Registries:
    """One registry per kind."""

    backends: Registry
    models: Registry
    scheduling: Registry
    admission: Registry
    routing: Registry
    eviction: Registry
    quantization: Registry

    @classmethod
    def from_manager(cls, manager: pluggy.PluginManager) -> Self:
        """Call every registering hook once and check what came back."""
        registries = {kind: Registry(kind, protocol) for kind, protocol in KINDS.items()}
        for kind, registry in registries.items():
            caller = getattr(manager.hook, f"headrace_register_{kind}")
            for implementation in caller.get_hookimpls():
                origin = implementation.plugin_name
                for target in _registered(implementation, kind, origin):
                    registry.add(target, origin)
        return cls(**registries)

    def of(self, kind: str) -> Registry:
        if kind not in KINDS:
            raise PluginError(f"no kind of plugin named '{kind}'. {did_you_mean(kind, KINDS)}")
        registry: Registry = getattr(self, kind)
        return registry

    def resolve(self, kind: str, use: str, base_dir: pathlib.Path) -> type[Any]:
        """Return the class that `use` names: a registered name, or a script `./file.py:Class`."""
        registry = self.of(kind)
        if not is_script(use):
            return registry.get(use)
        cls = load_class(use, base_dir)
        check_class(LABELS[kind], KINDS[kind], cls, use)
        _check_name(use, cls.name)
        return cls

    def create(
        self,
        kind: str,
        use: str,
        options: Mapping[str, Any] | None = None,
        base_dir: pathlib.Path = pathlib.Path(),
    ) -> Any:
        """Return an instance of the policy that `use` names, built with its checked options."""
        cls = self.resolve(kind, use, base_dir)
        built = build_options(cls, options, base_dir)
        try:
            return cls() if built is None else cls(built)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{LABELS[kind]} '{use}' cannot be built: {type(error).__name__}: {error}"
            ) from error


def _check_name(where: str, name: object) -> None:
    """Logs, metrics and the configuration tell policies apart by name: it must be one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(f"{where}: `name` must be letters, digits, `_`, `-` or `.`, got {name!r}")


def _registered(
    implementation: Any, kind: str, origin: str
) -> Sequence[type[Any] | ClassReference]:
    hook = f"headrace_register_{kind}"
    try:
        answer = implementation.function()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {origin}: {hook} failed: {type(error).__name__}: {error}. "
            f"Mend it, or block it with `plugins.blocked: [{origin}]`"
        ) from error
    if not isinstance(answer, (list, tuple)):
        raise PluginError(f"plugin {origin}: {hook} must return a list of classes, got {answer!r}")
    for target in answer:
        if not isinstance(target, (type, ClassReference)):
            raise PluginError(f"plugin {origin}: {hook} must return classes, got {target!r}")
    return answer


def _import(label: str, reference: ClassReference) -> type[Any]:
    module_name, _, class_name = reference.target.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{label} '{reference.name}' ({reference.target}) cannot be loaded: {error}"
        ) from error
    if not isinstance(cls, type):
        raise PluginError(f"{label} '{reference.name}': {reference.target} is not a class")
    return cls
