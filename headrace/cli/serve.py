"""`headrace serve`: the gateway and its engines, from one YAML."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load

if TYPE_CHECKING:
    from headrace.config import LoadedConfig


def serve(
    config: ConfigFile = None,
    model: ModelSource = None,
    host: str | None = typer.Option(None, help="Address to bind. Default: 127.0.0.1."),
    port: int | None = typer.Option(None, help="Port to bind; 0 picks a free one. Default: 8000."),
    settings: Settings = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API."""

    def read() -> LoadedConfig:
        return load(config, model=model, settings=settings, gateway__host=host, gateway__port=port)

    loaded = read()
    from headrace.server import run_server

    sys.exit(run_server(loaded, read))
