"""scripts/gpu-check without a GPU: every section on the emulated device, and what becomes of failures."""

from __future__ import annotations

import importlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.cuda_cpp import needs_cuda_cpp
from gpu.numba_simulated import needs_numba_cuda

ROOT = Path(__file__).parent.parent.parent
BACKENDS = [
    pytest.param("cupy_raw", marks=needs_cuda_cpp),
    pytest.param("cuda_numba", marks=needs_numba_cuda),
]
OPTIONS = Namespace(model="m", dry_run=False, minutes=10.0)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a module of scripts/gpu_check."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return lambda name: importlib.import_module(f"gpu_check.{name}")


# --- figures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("decode even bf16, % of copy", 74.9, "missed"),
        ("decode even bf16, % of copy", 75, "met"),
        ("decode even bf16, % of copy", 90, "aim met"),
        ("decode skewed bf16, % of even", 89, "missed"),
        ("decode even fp8, x bf16", 1.3, "met"),
        ("sample 64 x 128k greedy, us", 31, "missed"),
        ("sample 64 x 128k greedy, us", 30, "met"),
        ("sample 64 x 128k top-k + top-p, us", 60, "aim met"),
        ("host time of a prepared launch, us", 5.1, "missed"),
        ("decode step, 1 sequence, graph, ms", 1, ""),
    ],
)
def test_a_figure_is_held_against_its_goal(
    part: Callable[[str], Any], name: str, value: float, verdict: str
) -> None:
    assert part("figures").measured("b", "s", name, value).verdict == verdict


def test_the_table_has_a_column_per_backend(part: Callable[[str], Any]) -> None:
    figures = part("figures")
    name = "sample 64 x 128k greedy, us"
    lines = figures.table(
        [
            figures.measured("cupy_raw", "sampling", name, 12.3456),
            figures.measured("cuda_numba", "sampling", name, 40),
            figures.Figure("cuda_numba", "graphs", "replayed", None, "WRONG", "off by 1"),
        ],
        ["cupy_raw", "cuda_numba"],
    ).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["sampling", name, "<= 30", "12.35 met", "40 missed"]
    assert cells[3] == ["graphs", "replayed", "", "", "WRONG (off by 1)"]


def test_a_line_that_was_cut_off_is_left_out(part: Callable[[str], Any]) -> None:
    figures = part("figures")
    line = figures.Figure("b", "s", "n", 1.0).line()
    assert [figure.name for figure in figures.read_figures(f"{line}\n{line[:9]}")] == ["n"]


def test_the_documentation_has_a_line_for_every_figure_and_goal(part: Callable[[str], Any]) -> None:
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines if "|" in line}
    for name, goal in part("figures").GOALS.items():
        assert (name, "" if goal is None else str(goal)) in rows


# --- sections as processes --------------------------------------------------------------


class Starts:
    """Stands in for starting processes: writes what a section would have written. Mutable: keeps the calls."""

    def __init__(self, part: Callable[[str], Any], ends: dict[str, Any] | None = None) -> None:
        self._figures, self._driver = part("figures"), part("driver")
        self._ends = ends or {}
        self.now = 0.0
        self.calls: list[tuple[str, str, float]] = []

    def __call__(self, command: Sequence[str], seconds: float) -> Any:
        section, backend = (command[command.index(flag) + 1] for flag in ("--section", "--backend"))
        self.calls.append((section, backend, seconds))
        self.now += 10
        verdict, status, errors = self._ends.get(section, ("ok", 0, ""))
        if verdict:
            names = self._figures.MEASURED.get(section, ["a case"])
            lines = [self._figures.Figure(backend, section, n, None, verdict).line() for n in names]
            Path(command[command.index("--figures") + 1]).write_text("\n".join(lines) + "\n")
        return self._driver.Ended(status, errors)


def run(part: Callable[[str], Any], starts: Starts, backends: Sequence[str] = ("cupy_raw",)) -> Any:
    sections = list(part("sections").SECTIONS)
    return part("driver").run_all(
        OPTIONS, backends, sections, start=starts, clock=lambda: starts.now
    )


def test_every_section_runs_on_every_backend_within_the_time(part: Callable[[str], Any]) -> None:
    starts = Starts(part)
    figures = run(part, starts, ("cupy_raw", "cuda_numba"))
    sections = part("sections").SECTIONS
    assert [call[:2] for call in starts.calls] == [
        (section, backend) for section in sections for backend in ("cupy_raw", "cuda_numba")
    ]
    weight = sections["cases"].seconds / (2 * sum(s.seconds for s in sections.values()))
    assert starts.calls[0][2] == pytest.approx(600 * weight)
    assert starts.calls[1][2] == pytest.approx(600 * 2 * weight - 10), "what is left is passed on"
    assert 10 * (len(starts.calls) - 1) + starts.calls[-1][2] == pytest.approx(600)
    assert part("driver").is_right(figures)
    assert {f.name for f in figures} >= set(part("figures").GOALS)


@pytest.mark.parametrize(
    ("section", "end", "is_right", "reason"),
    [
        ("graphs", ("WRONG", 1, ""), False, ""),
        ("graphs", ("", None, ""), False, "not done after"),
        ("text", ("ok", -11, "x\nSegmentation fault"), False, "status -11: Segmentation fault"),
        ("text", ("", 0, ""), False, "it said nothing"),
        ("bandwidth", ("", 1, "OutOfMemoryError"), True, "status 1: OutOfMemoryError"),
        ("bandwidth", ("WRONG", 1, ""), False, ""),
        ("sanitizers", ("skipped", 0, ""), True, ""),
    ],
)
def test_a_section_that_fails_says_why_and_the_others_run(
    part: Callable[[str], Any], section: str, end: Any, is_right: bool, reason: str
) -> None:
    starts = Starts(part, {section: end})
    figures = run(part, starts)
    assert len(starts.calls) == len(part("sections").SECTIONS)
    assert part("driver").is_right(figures) == is_right
    notes = [f.note for f in figures if f.section == section and f.name == "the section"]
    assert len(notes) == bool(reason) and all(reason in note for note in notes)
    assert {f.name for f in figures} >= set(part("figures").GOALS), "also what was not measured"


def test_a_backend_that_is_not_there_is_asked_once(
    part: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe's own reason, from a process of its own."""
    monkeypatch.chdir(tmp_path)
    assert part("driver").main(["out.json", "--backend", "cuda_numba"]) == 1
    written = json.loads((tmp_path / "out.json").read_text())
    (figure,) = written["figures"]
    assert figure["name"] == "the backend" and figure["verdict"] == "failed"
    assert any(word in figure["note"] for word in ("install", "driver", "CUDA"))
    assert not written["is_right"]


def test_a_process_past_its_time_is_killed(part: Callable[[str], Any]) -> None:
    ended = part("driver").start_process(
        [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(600)"], 2.0
    )
    assert ended.status is None


def test_output_that_is_no_text_is_kept_readable(part: Callable[[str], Any]) -> None:
    ended = part("driver").start_process(["sh", "-c", "printf 'a\\377b'; exit 3"], 20.0)
    assert ended.status == 3 and ended.errors == "a\ufffdb"


def test_what_a_section_leaves_running_ends_with_it(part: Callable[[str], Any]) -> None:
    ended = part("driver").start_process(["sh", "-c", "sleep 600 & echo $!"], 20.0)
    assert ended.status == 0
    child = int(ended.errors)
    for _ in range(200):
        if not is_running(child):
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_file_that_cannot_be_written_is_refused_at_once(
    part: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        part("driver").main([str(tmp_path / "none" / "out.json"), "--dry-run"])
    assert "OUTPUT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--backend", "cpu"], ["--only", "cases,speed"]])
def test_what_it_does_not_know_is_refused(
    part: Callable[[str], Any], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        part("driver").main(arguments)
    assert f"{arguments[0]} takes" in capsys.readouterr().err


# --- verdicts ---------------------------------------------------------------------------


def completion(tokens: list[int], places: list[dict[int, float]]) -> Any:
    logprobs = [
        SimpleNamespace(
            chosen=SimpleNamespace(token_id=token, logprob=place[token]),
            top=[SimpleNamespace(token_id=key, logprob=value) for key, value in place.items()],
        )
        for token, place in zip(tokens, places, strict=True)
    ]
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


@pytest.mark.parametrize(
    ("got", "is_right"),
    [([5, 6], True), ([5, 7], True), ([5, 8], False), ([5, 9], False), ([5], False)],
)
def test_texts_may_part_at_near_ties_only(
    part: Callable[[str], Any], got: list[int], is_right: bool
) -> None:
    """7 is 0.1 less likely than 6, 8 is 0.2 less, 9 is not among the best."""
    expected = completion([5, 6], [{5: -0.1}, {6: -1.0, 7: -1.1, 8: -1.2}])
    assert part("served").compare(got, expected)[0] == is_right


def fake_stage(found: list[tuple[str, str, str]]) -> Any:
    return SimpleNamespace(
        is_dry=False, backend="cupy_raw",
        judged=lambda name, ok, note: found.append((name, "ok" if ok else "WRONG", note)),
        skipped=lambda name, reason: found.append((name, "skipped", reason)),
        failed=lambda name, error: found.append((name, "failed", str(error))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", "ok"),
        (86, "========= COMPUTE-SANITIZER\n========= Invalid __global__ write", "WRONG"),
        (1, "no device", "failed"),
    ],
)
def test_what_a_sanitizer_says_is_the_verdict(
    part: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    status: int, said: str, verdict: str,
) -> None:  # fmt: skip
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{said}'\necho '{said}' >&2\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found: list[tuple[str, str, str]] = []
    part("correctness").check_sanitizers(fake_stage(found))
    assert [(name, got) for name, got, _ in found] == [
        ("memcheck", verdict), ("racecheck", verdict),
    ]  # fmt: skip
    assert all(said.splitlines()[-1].strip("= ") in note for *_, note in found)


def test_a_sanitizer_that_is_not_there_is_skipped(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(part("correctness"), "sanitizer_path", lambda: None)
    part("correctness").check_sanitizers(fake_stage(found))
    assert [verdict for _, verdict, _ in found] == ["skipped", "skipped"]
    assert "not installed" in found[0][2]


def test_a_real_device_gets_every_case(part: Callable[[str], Any]) -> None:
    sizes = part("stage").Sizes()
    assert sizes.attention_cases is None and sizes.row_cases is None
    assert sum(sizes.decode_batches["even"]) == 32 * 4096
    assert sum(sizes.decode_batches["skewed"]) == sum(sizes.decode_batches["even"])


# --- on the emulated device -------------------------------------------------------------


def sectioned(part: Callable[[str], Any], section: str, backend: str) -> tuple[bool, list[Any]]:
    figures: list[Any] = []
    is_right = part("sections").run_section(section, backend, "", figures.append, is_dry=True)
    return is_right, figures


@pytest.mark.kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "section",
    ["cases", "graphs", "text", "bandwidth", "sampling", "launches", "steps", "sanitized"],
)
def test_a_section_gives_all_its_figures(
    part: Callable[[str], Any], section: str, backend: str
) -> None:
    is_right, figures = sectioned(part, section, backend)
    assert is_right, [figure for figure in figures if figure.verdict not in ("", "ok")]
    measured = [figure.name for figure in figures if figure.value is not None]
    assert measured == list(part("figures").MEASURED.get(section, ()))
    assert measured or sum(figure.verdict == "ok" for figure in figures) >= 2


@pytest.mark.kernels
@needs_cuda_cpp
def test_a_replay_that_does_nothing_is_wrong(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(step: Any, forward: Any, pool: Any = None) -> None:
        step._logits = forward(step.step)
        step._graph = SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(part("stage"), "_pretend_capture", capture)
    is_right, figures = sectioned(part, "graphs", "cupy_raw")
    assert not is_right
    verdicts = [figure.verdict for figure in figures]
    assert verdicts == ["ok", "WRONG", "WRONG", "WRONG", "WRONG", "WRONG", "WRONG"]


@pytest.mark.kernels
@needs_cuda_cpp
def test_a_wrong_kernel_is_one_wrong_line(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.cupy_raw.launches import CudaKernels

    monkeypatch.setattr(CudaKernels, "sample", lambda self, logits, draw: draw.token_ids.fill_(1))
    is_right, figures = sectioned(part, "cases", "cupy_raw")
    assert not is_right
    wrong = {figure.name for figure in figures if figure.verdict == "WRONG"}
    assert wrong and all(name.startswith("rows: draw_") for name in wrong)


@pytest.mark.kernels
@needs_cuda_cpp
def test_the_command_prints_a_table_and_writes_json(
    part: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = ["--dry-run", "--backend", "cupy_raw", "--only", "launches,sanitizers"]
    assert part("driver").main([str(out), *flags]) == 0
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    names = [figure["name"] for figure in written["figures"]]
    assert names == [*part("figures").LAUNCHES, "memcheck", "racecheck"]
    assert all(name in printed for name in names)
    assert written["figures"][0]["goal"] == "<= 5" and written["is_dry_run"]
