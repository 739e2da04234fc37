"""The composition root: what is chosen is imported, and nothing else can break it."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest

import headrace
from headrace.build import BuiltEngine, build_engine
from headrace.config import load_config, replica_config
from headrace.errors import PluginError
from headrace.plugins.hookspecs import ClassReference
from headrace.testing.tiny_models import write_tiny_checkpoint


class BrokenArchitectures:
    """A plugin whose architectures need a package that is not there."""

    @headrace.hookimpl
    def headrace_register_models(self) -> list[ClassReference]:
        return [ClassReference(name, "no_such_package.x:Y") for name in ("abacus", "millstone")]


def build(source: pathlib.Path) -> BuiltEngine:
    flags: dict[str, Any] = {
        "models.0.source": str(source),
        "models.0.backend": "simulated",
        "plugins.discover": False,
    }
    config = load_config(None, flags=flags, environ={}).config
    return build_engine(replica_config(config, 0), plugins=[BrokenArchitectures()])


def test_an_architecture_that_is_not_chosen_is_not_imported(tmp_path: pathlib.Path) -> None:
    built = build(write_tiny_checkpoint(tmp_path / "tiny"))
    assert built.card.architecture == "llama"
    built.engine.close()


def test_one_that_is_chosen_and_broken_says_why(tmp_path: pathlib.Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    table = msgspec.json.decode((source / "config.json").read_bytes())
    table["model_type"] = "millstone"
    (source / "config.json").write_bytes(msgspec.json.encode(table))
    with pytest.raises(PluginError, match=r"'millstone'.*no_such_package"):
        build(source)
