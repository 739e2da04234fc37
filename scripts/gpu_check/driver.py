"""Starts the sections one by one within the time there is, and puts their figures together.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.figures import FAILED, MEASURED, WRONG, Figure, as_json, read_figures, table
from gpu_check.sections import BACKEND_FIGURE, INNER, SECTIONS, run_child

BACKENDS = ("cupy_raw", "cuda_numba")
SCRIPT = Path(__file__).resolve().parent.parent / "gpu-check"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a section's process ended."""

    status: int | None
    """None: it was killed when its time was over."""
    errors: str
    """Its standard error."""


Start = Callable[[Sequence[str], float], Ended]
"""(command, seconds) -> how it ended."""


def start_process(command: Sequence[str], seconds: float) -> Ended:
    """Run a command, for `seconds` at most; whatever it has started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=errors, stderr=errors, text=True, start_new_session=True
        )
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        return Ended(status, errors.read())


def run_all(
    options: argparse.Namespace,
    backends: Sequence[str],
    sections: Sequence[str],
    *,
    start: Start = start_process,
    clock: Callable[[], float] = time.monotonic,
    save: Callable[[Sequence[Figure]], object] = lambda figures: None,
) -> list[Figure]:
    """Run every section on every backend. What one leaves of its time, the next ones may use.

    `save` is handed all figures so far, after each section.
    """
    runs = list(itertools.product(sections, backends))
    whole = sum(SECTIONS[section].seconds for section, _ in runs)
    figures: list[Figure] = []
    absent: set[str] = set()
    begin, share = clock(), 0.0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for count, (section, backend) in enumerate(runs):
            share += SECTIONS[section].seconds / whole
            if backend in absent:
                continue
            seconds = max(1.0, share * options.minutes * 60 - (clock() - begin))
            target = Path(folder) / f"{count}.jsonl"
            found = _run_one(options, section, backend, target, seconds, start)
            if any(figure.name == BACKEND_FIGURE for figure in found):
                absent.add(backend)
            figures += found
            save(figures)
    return figures


def _run_one(
    options: argparse.Namespace, section: str, backend: str, target: Path, seconds: float, start: Start
) -> list[Figure]:  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--section", section, "--backend", backend]
    command += ["--model", options.model, "--figures", str(target)]
    command += ["--dry-run"] if options.dry_run else []
    sys.stderr.write(f"{backend}: {section}, {seconds:.0f} s at most\n")
    ended = start(command, seconds)
    found = read_figures(target.read_text()) if target.exists() else []
    reason = _reason(ended, found, seconds)
    if reason:
        found.append(Figure(backend, section, "the section", None, FAILED, reason))
    if ended.status != 0:
        sys.stderr.write(ended.errors[-4000:])
    named = {figure.name for figure in found}
    if BACKEND_FIGURE not in named:
        why = reason or next((f.note for f in found if f.verdict == FAILED), "no such line came")
        found += [
            Figure(backend, section, name, None, FAILED, f"not measured: {why}")
            for name in MEASURED.get(section, ())
            if name not in named
        ]
    return found


def _reason(ended: Ended, found: Sequence[Figure], seconds: float) -> str:
    """Return why a section's process did not say how it ended; "" where it did."""
    if ended.status is None:
        return f"not done after {seconds:.0f} s"
    if ended.status == 0 and found:
        return ""
    if any(figure.verdict in (WRONG, FAILED) for figure in found) and ended.status == 1:
        return ""
    last = (ended.errors.strip().splitlines() or ["it said nothing"])[-1]
    return f"the process ended with status {ended.status}: {last[:160]}"


def is_right(figures: Sequence[Figure]) -> bool:
    """Say whether all was judged, and all of it right."""
    return not any(
        figure.verdict == WRONG
        or (figure.verdict == FAILED and (SECTIONS[figure.section].judges or figure.name == BACKEND_FIGURE))
        for figure in figures
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Judge the GPU backends on a device."
    )
    parser.add_argument("output", nargs="?", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--backend", default=",".join(BACKENDS), help="one or more, by commas")
    parser.add_argument("--model", default=None, help="a path, or smollm2 (the default)")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="little work on the emulated device, with a tiny model: shows that the check itself runs",
    )  # fmt: skip
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    return parser


def _chosen(
    parser: argparse.ArgumentParser, given: str, known: Sequence[str], flag: str
) -> list[str]:
    names = [name for name in given.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"{flag} takes {', '.join(known)}; got {given!r}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole, or the one section that a process is for. Return the exit status."""
    parser = _parser()
    options: Any = parser.parse_args(arguments)
    if options.model is None:
        options.model = "" if options.dry_run else "smollm2"
    backends = _chosen(parser, options.backend, BACKENDS, "--backend")
    if options.section is not None:
        if options.section not in {**SECTIONS, **INNER} or len(backends) != 1:
            parser.error("--section takes one section of one backend")
        return run_child(
            options.section, backends[0], options.model, options.figures, is_dry=options.dry_run
        )
    sections = _chosen(parser, options.only, list(SECTIONS), "--only")
    begin = time.monotonic()

    def save(figures: Sequence[Figure]) -> None:
        facts = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "seconds": round(time.monotonic() - begin, 1),
            "is_dry_run": options.dry_run,
            "model": options.model,
            "is_right": bool(figures) and is_right(figures),
        }
        options.output.write_text(as_json(figures, facts))

    try:
        save([])
    except OSError as error:
        parser.error(f"OUTPUT {options.output}: {error.strerror}; name a file that can be written")
    figures = run_all(options, backends, sections, save=save)
    verdict = is_right(figures)
    print(table(figures, backends))
    if not verdict:
        print(f"gpu-check: something is wrong or was not judged: {options.output} has every line")
    return 0 if verdict else 1
