"""`headrace serve`: the gateway and its engines, from one YAML."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load

if TYPE_CHECKING:
    from headrace.config import LoadedConfig

PRELOADED = (
    "headrace.build",
    "headrace.engine.engine",
    "headrace.models.checkpoint",
    "headrace.text.tokenizer",
)
"""What every engine process imports sooner or later."""
PRELOADED_FOR_CPU = ("headrace.backends.cpu.fast.runner",)


def serve(
    config: ConfigFile = None,
    model: ModelSource = None,
    host: str | None = typer.Option(None, help="Address to bind. Default: 127.0.0.1."),
    port: int | None = typer.Option(None, help="Port to bind; 0 picks a free one. Default: 8000."),
    watch: bool = typer.Option(
        False, "--watch", help="Swap a policy's script in again whenever it is saved."
    ),
    settings: Settings = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API."""

    def read() -> LoadedConfig:
        return load(config, model=model, settings=settings, gateway__host=host, gateway__port=port)

    loaded = read()
    heed_signals()
    start_first_engine(loaded)
    from headrace.server import run_server

    sys.exit(run_server(loaded, read, watch=watch))


def heed_signals() -> None:
    """Until the gateway takes signals itself: SIGTERM ends as it always does, with what was started; a SIGHUP
    finds nothing to read again.
    """
    signal.signal(signal.SIGTERM, _end)
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def _end(number: int, frame: object) -> None:
    sys.exit(0)


def start_first_engine(loaded: LoadedConfig) -> None:
    """Start the first engine's process, so that it imports what it needs while the gateway does the same."""
    from headrace.engine.spawn import WORKER_COMMAND, start_early

    for model in loaded.config.models:
        if any(entry.kind == "process" for entry in model.replica_entries):
            modules = PRELOADED + (PRELOADED_FOR_CPU if model.backend.use == "cpu" else ())
            start_early(WORKER_COMMAND, [f"--preload={module}" for module in modules])
            return
