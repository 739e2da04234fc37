"""Making a plugin manager whose every plugin has been checked, or refusing with the plugin's name.

Plugins are found by the entry-point group `headrace`. The manager is a value that is passed on, not
a global.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import pluggy
import structlog

from headrace.errors import PluginError, did_you_mean
from headrace.plugins import builtin, hookspecs
from headrace.plugins.hookspecs import NAME

BUILTIN_NAME = "builtin"
_PREFIX = "headrace_"


def create_plugin_manager(
    *, discover: bool = True, blocked: Sequence[str] = (), plugins: Sequence[object] = ()
) -> pluggy.PluginManager:
    """Return a manager with the built-ins, the announced plugins and `plugins`.

    PluginError names the plugin that cannot be loaded or breaks its contract.
    """
    manager = pluggy.PluginManager(NAME)
    manager.add_hookspecs(hookspecs)
    if BUILTIN_NAME in blocked:
        raise PluginError("plugins.blocked: the built-in plugin cannot be blocked")
    manager.register(builtin, name=BUILTIN_NAME)
    if discover:
        announced = sorted(
            importlib.metadata.entry_points(group=NAME), key=lambda point: point.name
        )
        _warn_about_unknown_blocks(blocked, [point.name for point in announced])
        for point in announced:
            if point.name not in blocked:
                _register(manager, _load(point), point.name)
    for plugin in plugins:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        if name not in blocked:
            _register(manager, plugin, name)
    _check_hook_names(manager)
    return manager


def notify(manager: pluggy.PluginManager, hook: str, **facts: Any) -> None:
    """Tell every observer a fact. One that raises is logged and keeps no other from being told."""
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        try:
            implementation.function(*[facts[name] for name in implementation.argnames])
        except (Exception, SystemExit) as error:
            structlog.get_logger(__name__).warning(
                "plugin_hook_failed",
                plugin=implementation.plugin_name,
                hook=hook,
                error=f"{type(error).__name__}: {error}",
            )


def _load(point: importlib.metadata.EntryPoint) -> object:
    package = f" of package {point.dist.name}" if point.dist else ""
    try:
        plugin: object = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {point.name}{package} ({point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Mend it, or block it with `plugins.blocked: [{point.name}]`"
        ) from error
    return plugin


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    _check_markers(plugin, name)
    try:
        manager.register(plugin, name=name)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name}: {' '.join(str(error).split())}") from error
    except ValueError:
        raise PluginError(
            f"two plugins are named '{name}': {manager.get_plugin(name)!r} and {plugin!r}"
        ) from None


def _check_markers(plugin: object, name: str) -> None:
    """Refuse a hook written without its marker: pluggy would pass over it in silence."""
    for attribute in dir(plugin):
        if not attribute.startswith(_PREFIX):
            continue
        member = getattr(plugin, attribute)
        own = getattr(member, "__module__", None) == getattr(
            plugin, "__name__", plugin.__class__.__module__
        )
        if callable(member) and own and not hasattr(member, f"{NAME}_impl"):
            raise PluginError(
                f"plugin {name}: {attribute} has no @headrace.hookimpl, so it would never be called"
            )


def _check_hook_names(manager: pluggy.PluginManager) -> None:
    known = [name for name in dir(hookspecs) if name.startswith(_PREFIX)]
    for plugin_name, plugin in manager.list_name_plugin():
        for caller in manager.get_hookcallers(plugin) or []:
            if caller.name not in known and not _is_optional(caller, plugin):
                raise PluginError(
                    f"plugin {plugin_name}: no hook named '{caller.name}'. {did_you_mean(caller.name, known)}"
                )
    manager.check_pending()


def _is_optional(caller: pluggy.HookCaller, plugin: object) -> bool:
    return all(
        implementation.optionalhook
        for implementation in caller.get_hookimpls()
        if implementation.plugin is plugin
    )


def _warn_about_unknown_blocks(blocked: Iterable[str], announced: Sequence[str]) -> None:
    for name in blocked:
        if name not in announced:
            near = difflib.get_close_matches(name, announced, n=1)
            structlog.get_logger(__name__).warning(
                "blocked_plugin_not_installed", plugin=name, did_you_mean=near[0] if near else None
            )
