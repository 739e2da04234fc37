"""docs/simulator.md: every command runs as written, every workload, option and device is there."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shlex

from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.simulator.hardware import ACCELERATORS, MODELS
from headrace.simulator.workloads import WORKLOADS

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "simulator.md").read_text()


def test_every_command_runs_as_written(tmp_path: pathlib.Path) -> None:
    commands = re.findall(r"^\$ headrace (.*)$", TEXT, re.M)
    assert len(commands) >= 7
    with contextlib.chdir(tmp_path):
        for command in commands:
            result = CliRunner().invoke(app, shlex.split(command))
            assert result.exit_code == 0, (command, result.output, result.exception)
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"burst.html", "burst.json", "chats.jsonl", "tuned.yaml"}


def test_everything_there_is_is_named() -> None:
    for name, workload in WORKLOADS.items():
        [row] = re.findall(rf"^\| `{name}` \|.*\|$", TEXT, re.M)
        assert f"| {workload.requests_per_second:g} |" in row, name
    for name in (*ACCELERATORS, *MODELS):
        assert f"`{name}`" in TEXT, name
