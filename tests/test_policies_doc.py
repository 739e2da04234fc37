"""docs/policies.md from its first line to its last, as someone new would follow it, in one folder."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys

import httpx
import pytest

from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "policies.md").read_text()
BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)


def command(words: list[str], folder: pathlib.Path, exported: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        cwd=folder,
        env={**os.environ, **exported},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def means(printed: str) -> dict[tuple[str, str], float]:
    rows = re.findall(r"^(\w+) +priority +(-?\d): mean ([\d.]+) s", printed, re.M)
    return {(policy, priority): float(mean) for policy, priority, mean in rows}


def test_the_page_works_as_written(tmp_path: pathlib.Path) -> None:
    server: StartedServer | None = None
    said: list[str] = []
    exported: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for file, language, text in BLOCK.findall(TEXT):
            if file:
                (tmp_path / file).write_text(text)
            elif language == "py":
                printed = io.StringIO()
                with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
                    exec(compile(text, "docs/policies.md", "exec", dont_inherit=True), {})
                found = means(printed.getvalue())
                assert found["express", "-1"] < 0.5 * found["fcfs", "-1"]
                assert found["express", "0"] < 1.5 * found["fcfs", "0"]
            for program, line in re.findall(r"^\$ (\w+) (.*)$", text, re.M):
                if program == "export":
                    exported.update([line.split("=")])
                    continue
                words = shlex.split(line)
                if words[0] == "serve":
                    script = write_script(tmp_path / "script.json", ["x"])
                    model = ["--model", f"scripted:{script}", "--set", "models.0.backend=simulated"]
                    server = stack.enter_context(
                        started_server(
                            [*words[1:], *model], environment=exported, cwd=str(tmp_path)
                        )
                    )
                    continue
                if words[:2] == ["policies", "swap"]:
                    assert server is not None
                    words += ["--url", server.url]
                said.append(command(words, tmp_path, exported))
        assert server is not None
        key = {"authorization": f"Bearer {exported['HEADRACE_ADMIN_KEY']}"}
        answer = httpx.get(f"{server.url}/admin/policies", headers=key)
        [scheduling] = [p for p in answer.json()["policies"] if p["kind"] == "scheduling"]
        assert (scheduling["name"], scheduling["options"]) == ("express", {"patience": "2s"})
    assert any("every promise is kept" in each for each in said)
    assert any("is in force in" in each for each in said)
    urgent = {
        policy: float(p50)
        for each in said
        for policy, p50 in re.findall(r"^urgent, (\w+) +\d+ +\d+ +([\d.]+) ", each, re.M)
    }
    assert urgent["Express"] < 0.1 * urgent["fcfs"]
    assert "<svg" in (tmp_path / "express.html").read_text()


def test_without_its_bound_the_example_is_told_that_it_starves(tmp_path: pathlib.Path) -> None:
    """What the page says of leaving `patience` out."""
    example = next(text for file, _, text in BLOCK.findall(TEXT) if file == "express.py")
    bound = example[
        example.index("            if view.now") : example.index("            is_urgent")
    ]
    (tmp_path / "express.py").write_text(example.replace(bound, ""))
    with pytest.raises(AssertionError, match="no token after 90 s"):
        command(["policies", "check", "express.py"], tmp_path, {})


def test_the_tables_name_every_builtin_and_option() -> None:
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import Registries

    registries = Registries.from_manager(create_plugin_manager(discover=False))
    for kind in ("scheduling", "eviction"):
        for name in registries.of(kind).names():
            [row] = re.findall(rf"^\| `{name}` \|.*\|$", TEXT, re.M)
            options = getattr(registries.of(kind).get(name), "Options", None)
            for option in getattr(options, "__dataclass_fields__", {}):
                assert f"`{option}`" in row, (name, option)
