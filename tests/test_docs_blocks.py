"""Every block of the README and the docs is executed, loaded or parsed: they cannot go stale."""

from __future__ import annotations

import contextlib
import io
import pathlib
import shlex
import subprocess
import sys

import pytest
import typer
from doc_blocks import ROOT, CodeBlock, code_blocks

from headrace.config import load_config
from headrace.testing.server import StartedServer

ADDRESS = "http://127.0.0.1:8000"


def test_the_readme_starts_with_the_two_commands() -> None:
    first = code_blocks("console", files=("README.md",))[0]
    assert first.text.split("\n")[:2] == ["$ make serve", "$ make test"]
    targets = (ROOT / "Makefile").read_text()
    assert "\nserve:\n" in targets and "\ntest:\n" in targets


@pytest.mark.parametrize("block", code_blocks("python"), ids=str)
def test_python_blocks_run(
    block: CodeBlock, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    text = block.text
    if ADDRESS in text:
        server: StartedServer = request.getfixturevalue("real_server")
        text = text.replace(ADDRESS, server.url)
    if "headrace.LLM" in text or "LLM(" in text:
        request.getfixturevalue("smollm2_gguf")  # the model is in the cache before the block asks
    printed = io.StringIO()
    namespace: dict[str, object] = {"__name__": "block"}
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        exec(compile(text, str(block), "exec", dont_inherit=True), namespace)
    if "capital of France" in text:
        assert "Paris" in printed.getvalue()


@pytest.mark.parametrize("block", code_blocks("yaml"), ids=str)
def test_yaml_blocks_load(block: CodeBlock, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(block.text)
    assert load_config(file, environ={}).config.models


def console_commands() -> list[tuple[CodeBlock, str]]:
    found = []
    for block in code_blocks("console"):
        for line in block.text.splitlines():
            words = line.removeprefix("$ ")
            if line.startswith("$ ") and words.split()[0] == "headrace":
                found.append((block, words))
    return found


def test_there_are_console_commands() -> None:
    assert len(console_commands()) >= 8


@pytest.mark.parametrize(("block", "line"), console_commands(), ids=str)
def test_console_commands_parse(block: CodeBlock, line: str) -> None:
    from headrace.cli.app import app

    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    context = group.make_context("headrace", list(words), resilient_parsing=True)
    name = words[0]
    command = group.get_command(context, name)  # type: ignore[attr-defined]
    assert command is not None, f"{block}: no command {name!r}"
    command.make_context(name, words[1:], parent=context)


@pytest.mark.parametrize(
    ("block", "line"), [pair for pair in console_commands() if pair[0].run], ids=str
)
def test_marked_console_commands_run(block: CodeBlock, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{block}: {done.stderr}"
