"""Whether the plugins that a configuration chooses exist, take the options it gives them and can be built.

Policies are built once and thrown away, so that an `__init__` that raises is found before anything
starts; of backends only the `Options` are. An error carries the key and where it was written.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping

from headrace.config.load import LoadedConfig
from headrace.config.schema import Choice, Config
from headrace.errors import ConfigError, PluginError
from headrace.plugins.options import build_options
from headrace.plugins.registry import Registries


def choices(config: Config) -> Iterator[tuple[str, str, Choice]]:
    """Yield (kind, key, choice) for every plugin the configuration chooses."""
    for index, model in enumerate(config.models):
        if model.is_remote:
            continue  # what runs elsewhere is chosen there
        yield "backends", f"models.{index}.backend", model.backend
        for kind in model.policies.__struct_fields__:
            yield kind, f"models.{index}.policies.{kind}", getattr(model.policies, kind)
    yield "routing", "routing", config.routing
    for index, choice in enumerate(config.admission):
        yield "admission", f"admission.{index}", choice


def check_choices(loaded: LoadedConfig, registries: Registries) -> None:
    """Raise ConfigError for the first choice that names no plugin or gives it wrong options."""
    base_dir = pathlib.Path(loaded.config.base_dir)
    for kind, key, choice in choices(loaded.config):
        try:
            cls = registries.resolve(kind, choice.use, base_dir)
            if kind == "backends":
                build_options(cls, choice.options, base_dir)
            else:
                registries.create(kind, choice.use, choice.options, base_dir)
        except PluginError as error:
            where = _origin(loaded.origins, key, choice, str(error))
            raise ConfigError(f"{where}, key {key}: {error}") from error


def _origin(origins: Mapping[str, str], key: str, choice: Choice, message: str) -> str:
    """Return where the option that the message is about was written, else where the choice was."""
    for option in choice.options:
        path = f"{key}.options.{option}"
        if f"option {option} " in message or f"option '{option}'" in message:
            near = [origin for name, origin in origins.items() if name.startswith(path)]
            if near:
                return near[0]
    return origins.get(f"{key}.use", "default")
