"""`headrace bench` from the command line, on a server that really streams."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from headrace.testing.server import StartedServer

BENCHMARK = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "serving.py"


def bench(*arguments: str, script: bool = False) -> subprocess.CompletedProcess[str]:
    command = [str(BENCHMARK)] if script else ["-m", "headrace", "bench"]
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=120
    )


def test_a_bench_prints_and_writes_every_load(
    scripted_server: StartedServer, tmp_path: pathlib.Path
) -> None:
    json_file, page = tmp_path / "figures.json", tmp_path / "page.html"
    done = bench(
        "--url", scripted_server.url, "--concurrency", "1,3", "--requests", "4", "--endpoint", "chat",
        "--slo", "ttft=60s,e2e=60s", "--json", str(json_file), "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(4 of 4)" in done.stdout and "ITL (ms)" in done.stdout
    runs = json.loads(json_file.read_text())["runs"]
    assert [run["load"]["concurrency"] for run in runs] == [1, 3]
    assert all(run["errors"] == 0 and run["slo_share"] == 1 for run in runs)
    assert all(outcome["output_tokens"] > 0 for run in runs for outcome in run["outcomes"])
    assert page.read_text().count("<svg") == 8


def test_the_script_is_the_same_and_an_open_loop_keeps_its_rate(
    scripted_server: StartedServer, tmp_path: pathlib.Path
) -> None:
    json_file = tmp_path / "figures.json"
    done = bench(
        "--url", scripted_server.url, "--request-rate", "20", "--requests", "5", "--burstiness", "0.5",
        "--json", str(json_file), script=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(json_file.read_text())["runs"]
    assert run["load"]["request_rate"] == 20 and run["load"]["concurrency"] is None
    starts = [outcome["start_seconds"] for outcome in run["outcomes"]]
    assert starts[-1] - starts[0] == pytest.approx(4 / 20)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--endpoint", "speech"), "--endpoint 'speech'"),
        (("--concurrency", "0"), "--concurrency '0'"),
        (("--concurrency", "1.5"), "whole numbers from 1"),
        (("--request-rate", "fast"), "--request-rate 'fast'"),
        (("--burstiness", "0"), "--burstiness 0"),
        (("--prompt-tokens", "some"), "--prompt-tokens 'some'"),
        (("--slo", "speed=1s"), "--slo 'speed=1s'"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
        (("--profile", "x.json"), "--profile measures"),
        (("--html", "/no/such/folder/x.html"), "--html"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(arguments: tuple[str, ...], reason: str) -> None:
    done = bench("--url", "http://127.0.0.1:1", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
