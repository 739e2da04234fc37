"""Without make and without the clone: a wheel in a fresh environment serves from another folder."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import httpx
import pytest

from headrace.testing.script_file import write_script
from headrace.testing.server import started_server

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "headrace"
    copied = subprocess.run(
        ["git", "-C", str(ROOT), "checkout-index", "--all", f"--prefix={source}/"],
        capture_output=True,
    )
    if copied.returncode != 0:
        pytest.skip("this is not a git checkout")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    build += ["--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}
    assert "headrace/py.typed" in names
    assert "headrace/engine/engine.py" in names and "headrace/backends/cpu/ops.py" in names


def test_a_fresh_environment_serves_from_another_folder(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The environment is new; the dependencies are this one's, put on its path (installing takes minutes)."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    here = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = pathlib.Path(here.stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "plugins").mkdir(parents=True)
    (elsewhere / "plugins" / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    script = write_script(elsewhere / "script.json", ["Hi"])
    with started_server(
        ["--model", f"scripted:{script}"],
        command=[str(environment / "bin" / "headrace")],
        cwd=str(elsewhere),
        environment={"PYTHONPATH": "", "PATH": os.environ["PATH"]},
    ) as server:
        shown = subprocess.run(
            [str(python), "-c", "import headrace.engine; print(headrace.engine.__file__)"],
            capture_output=True,
            text=True,
            check=True,
            cwd=elsewhere,
        )
        assert shown.stdout.startswith(str(site))
        body = {"prompt": "x", "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
        assert answer["choices"][0]["text"] == "Hi"
