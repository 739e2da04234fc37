"""`headrace policies`, as a person runs it."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable

import pytest

from headrace.cli.policies import KINDS
from headrace.testing.policy_report import examine

Run = Callable[..., tuple[int, str, str]]
UNBOUNDED = """
class Unbounded:
    name = "unbounded"

    def rank_waiting(self, waiting, view):
        return sorted(waiting, key=lambda request: request.num_prompt_tokens)

    def choose_victim(self, running, view):
        return running[-1]

    def prefill_budget(self, view):
        return view.token_budget
"""


@pytest.fixture
def headrace(headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Run:
    """Runs a command as all tests here do, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return headrace


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_policy_works_as_it_is_written(headrace: Run, kind: str) -> None:
    code, out, _ = headrace("policies", "new", kind, f"my_{kind}.py")
    assert code == 0
    assert f"headrace policies check my_{kind}.py" in out
    assert pathlib.Path(f"my_{kind}.py").read_text().count("#") >= 2
    code, out, _ = headrace("policies", "check", f"my_{kind}.py")
    assert code == 0, out
    assert f"{kind} policy 'my_{kind}'" in out
    assert "every promise is kept" in out


def test_nothing_is_written_over(headrace: Run) -> None:
    pathlib.Path("mine.py").write_text("x = 1\n")
    code, _, err = headrace("policies", "new", "scheduling", "mine.py")
    assert code == 1
    assert "exists already" in err
    assert pathlib.Path("mine.py").read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "schedulling", "x.py"], "Did you mean 'scheduling'"),
        (["new", "scheduling", "x.txt"], "ending .py"),
        (["check", "nowhere.py"], "cannot be read"),
        (["check", "fcfs", "-o", "patience"], "write it as name=value"),
        (["check", "shortest_first", "-o", "patience=5"], "option patience must be a duration"),
        (["check", "nothing"], "keeps no kind's contract"),
        (["swap", "scheduling", "fcfs", "--url", "http://127.0.0.1:1"], "no answer"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(
    headrace: Run, words: list[str], message: str
) -> None:
    code, _, err = headrace("policies", *words)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_a_policy_under_which_someone_starves_is_told_so(headrace: Run) -> None:
    pathlib.Path("unbounded.py").write_text(UNBOUNDED)
    code, out, _ = headrace("policies", "check", "unbounded.py")
    assert code == 1
    assert re.search(r"BROKEN\s+nobody waits longer", out)
    assert "1 of 3 promises are broken" in out


def test_an_impure_policy_is_told_what_it_broke(headrace: Run) -> None:
    pathlib.Path("odd.py").write_text(UNBOUNDED.replace("sorted(waiting", "sorted(waiting[1:]"))
    code, out, _ = headrace("policies", "check", "odd.py:Unbounded")
    assert code == 1
    assert "the order has 0 of the 1 waiting requests" in out


def test_a_slow_policy_is_told_its_time() -> None:
    from headrace.policies.scheduling.fcfs import FirstComeFirstServed

    class Slow(FirstComeFirstServed):
        def rank_waiting(self, waiting, view):  # type: ignore[no-untyped-def]
            if len(waiting) > 500:
                sum(range(10_000_000))
            return super().rank_waiting(waiting, view)

    [found] = [each for each in examine("scheduling", Slow) if "is ranked" in each.promise]
    assert "longer calls are cut off" in found.breach


@pytest.mark.parametrize(
    ("body", "kept", "breach"),
    [
        ("raise SystemExit(0)", 0, "raised SystemExit: 0"),
        ("raise GeneratorExit", 0, "raised GeneratorExit"),
        ("if len(waiting) > 500: raise ValueError('long')", 1, "it raised ValueError: long"),
        ("while len(waiting) > 500: pass", 1, "did not come to an end"),
        ("if len(waiting) > 500: return waiting[:9]", 1, "the order has 9 of the 1000"),
        ("if waiting and waiting[0].num_prompt_tokens == 6000: raise KeyError", 2, "KeyError"),
    ],
)
def test_a_check_always_ends_in_a_verdict(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, body: str, kept: int, breach: str
) -> None:
    """A policy that leaves with exit code 0 is not kept by anybody's build for a good one."""
    if "while" in body:
        monkeypatch.setattr("headrace.testing.policy_report._LOOK_SECONDS", 1.0)
    source = UNBOUNDED.replace("        return sorted", f"        {body}\n        return sorted")
    source = source.replace("request.num_prompt_tokens)", "request.arrival_time)")
    pathlib.Path("odd.py").write_text(source)
    code, out, err = headrace("policies", "check", "odd.py")
    assert (code, err) == (1, "")
    assert len(re.findall(r"^  ok ", out, re.MULTILINE)) == kept
    assert breach in out


def test_list_names_every_policy(headrace: Run) -> None:
    code, out, _ = headrace("policies", "list")
    assert code == 0
    for row in ("scheduling +fair_share", "eviction +priority_ttl", "routing +round_robin"):
        assert re.search(rf"^{row} +builtin +\S", out, re.M)


def test_check_config_builds_policies(headrace: Run) -> None:
    text = UNBOUNDED + "\n    def __init__(self):\n        raise RuntimeError('no water')\n"
    pathlib.Path("dry.py").write_text(text)
    pathlib.Path("headrace.yaml").write_text(
        "models:\n  - source: smollm2\n    policies: {scheduling: ./dry.py:Unbounded}\n"
    )
    code, _, err = headrace("check-config", "-c", "headrace.yaml")
    assert code == 1
    assert "headrace.yaml" in err and "line 3" in err
    assert "RuntimeError: no water" in err


def test_a_package_of_someone_else_registers_a_scheduler(tmp_path: pathlib.Path) -> None:
    """Installed as a wheel is: its files and its entry point, in a folder on the path."""
    source = pathlib.Path(__file__).parents[1] / "third_party" / "waterwheel"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    info = site / f"{project['name']}-{project['version']}.dist-info"
    wheel = tmp_path / f"{project['name']}-{project['version']}-py3-none-any.whl"
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in table.items())
        for group, table in project["entry-points"].items()
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted(source.glob("waterwheel/*.py")):
            archive.write(file, f"waterwheel/{file.name}")
        archive.writestr(
            f"{info.name}/METADATA",
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        )
        archive.writestr(f"{info.name}/entry_points.txt", points)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from headrace.cli import main; main()", *words],
            env={"PYTHONPATH": str(site), "PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.search(r"scheduling +waterwheel +waterwheel", run("plugins"))
    assert "every promise is kept" in run("policies", "check", "waterwheel")
