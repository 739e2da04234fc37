"""`headrace plugins`: what is installed, who brought it, and whether it can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cli.options import ConfigFile, Settings, load
from headrace.cli.table import print_table
from headrace.errors import PluginError

if TYPE_CHECKING:
    from headrace.plugins.registry import Entry, Registry


def plugins(config: ConfigFile = None, settings: Settings = None) -> None:
    """List every backend, model and policy: its kind, name and origin, and whether it can run here."""
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import KINDS, Registries

    chosen = load(config, settings=settings).config.plugins
    manager = create_plugin_manager(discover=chosen.discover, blocked=chosen.blocked)
    registries = Registries.from_manager(manager)
    rows = [("KIND", "NAME", "ORIGIN", "AVAILABLE")]
    for kind in KINDS:
        registry = registries.of(kind)
        rows += [
            (kind, entry.name, entry.origin, _availability(registry, entry)) for entry in registry
        ]
    print_table(rows)


def _availability(registry: Registry, entry: Entry) -> str:
    """Return "yes", or "no" with the reason. Only backends depend on the machine."""
    try:
        cls = registry.get(entry.name)
    except PluginError as error:
        return f"no: {error}"
    if registry.kind != "backends":
        return "yes"
    answer = cls.probe()
    return "yes" if answer.ok else f"no: {answer.reason}"
