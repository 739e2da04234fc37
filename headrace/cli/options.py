"""Flags that several commands share, and how they become configuration keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.config import LoadedConfig

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="The YAML file. Default: built-in defaults.")
]
ModelSource = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A GGUF file, a checkpoint folder, hf:org/name[@revision][:file], pkg:NAME, or smollm2.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key: --set models.0.engine.max_model_len=2048. Repeatable."),
]


def load(
    config: Path | None,
    *,
    model: str | None = None,
    settings: list[str] | None = None,
    **keys: Any,
) -> LoadedConfig:
    """Return the effective configuration. `keys` are dotted keys with `__` for the dots."""
    from headrace.config import load_config, parse_assignments

    flags: dict[str, Any] = {}
    if model is not None:
        flags["models.0.source"] = model
    for name, value in keys.items():
        if value is not None:
            flags[name.replace("__", ".")] = value
    flags.update(parse_assignments(settings or ()))
    return load_config(config, flags=flags)
