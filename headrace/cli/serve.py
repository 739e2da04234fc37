"""`headrace serve`: the gateway and its engines, from one YAML."""

from __future__ import annotations

import sys

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load


def serve(
    config: ConfigFile = None,
    model: ModelSource = None,
    host: str | None = typer.Option(None, help="Address to bind. Default: 127.0.0.1."),
    port: int | None = typer.Option(None, help="Port to bind; 0 picks a free one. Default: 8000."),
    settings: Settings = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API."""
    loaded = load(config, model=model, settings=settings, gateway__host=host, gateway__port=port)
    from headrace.server import run_server

    sys.exit(run_server(loaded))
