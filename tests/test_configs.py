"""Every file in configs/ loads, and every plugin it chooses exists and takes its options."""

from __future__ import annotations

import pathlib

import pytest

from headrace.config import load_config
from headrace.config.check import check_choices
from headrace.config.render import render
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries

FOR_OTHERS = {"grafana-dashboard.json", "prometheus-alerts.yaml"}
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(file for file in FOLDER.iterdir() if file.name not in FOR_OTHERS)


def test_there_are_examples() -> None:
    assert {file.name for file in FILES} >= {"smollm2.yaml", "two-replicas.yaml"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_valid(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    loaded = load_config(file, environ={})
    check_choices(loaded, Registries.from_manager(create_plugin_manager(discover=False)))
    (tmp_path / "printed.yaml").write_text(render(loaded))
    assert load_config(tmp_path / "printed.yaml", environ={}).config.models == loaded.config.models


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_says_what_it_is_for(file: pathlib.Path) -> None:
    assert file.read_text().startswith("# ")
