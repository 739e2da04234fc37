"""`headrace check-config`: the effective configuration and where each value came from."""

from __future__ import annotations

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load


def check_config(
    config: ConfigFile = None, model: ModelSource = None, settings: Settings = None
) -> None:
    """Check a configuration and print it in full, each value with where it came from."""
    from headrace.config.check import check_choices
    from headrace.config.render import render
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import Registries

    loaded = load(config, model=model, settings=settings)
    chosen = loaded.config.plugins
    manager = create_plugin_manager(discover=chosen.discover, blocked=chosen.blocked)
    check_choices(loaded, Registries.from_manager(manager))
    typer.echo(render(loaded), nl=False)
