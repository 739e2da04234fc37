"""The sections in the order they run, and the process that runs one of them.

A section has a process of its own: an illegal access leaves a CUDA context that answers nothing but errors, and
a kernel that hangs can only be killed.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_check.figures import FAILED, WRONG, Figure

BACKEND_FIGURE = "the backend"
"""The name of the figure that says that a backend does not run here."""


@dataclass(frozen=True, slots=True)
class Section:
    """What one process does, and its share of the time."""

    function: str
    seconds: int
    judges: bool
    """Whether it is about right and wrong: where it cannot be run to its end, the whole has failed."""


SECTIONS: Mapping[str, Section] = {
    "cases": Section("correctness:check_cases", 90, True),
    "graphs": Section("correctness:check_graphs", 25, True),
    "text": Section("served:check_text", 50, True),
    "bandwidth": Section("speed:measure_bandwidth", 30, False),
    "sampling": Section("speed:measure_sampling", 15, False),
    "launches": Section("speed:measure_launches", 10, False),
    "steps": Section("served:measure_steps", 30, False),
    "sanitizers": Section("correctness:check_sanitizers", 50, True),
}
INNER = {"sanitized": Section("correctness:run_sanitized", 0, True)}
"""What a section starts itself."""


def run_section(
    name: str, backend: str, model: str, write: Callable[[Figure], None], *, is_dry: bool
) -> bool:
    """Run one section and hand out its figures; what it raises is one.

    Return whether all was right.
    """
    from gpu_check.stage import Unavailable, reason_of, staged

    is_right = True

    def noted(figure: Figure) -> None:
        nonlocal is_right
        is_right = is_right and figure.verdict not in (WRONG, FAILED)
        write(figure)

    section = {**SECTIONS, **INNER}[name]
    module, _, function = section.function.partition(":")
    try:
        with staged(backend, name, model, noted, is_dry=is_dry) as stage:
            getattr(importlib.import_module(f"gpu_check.{module}"), function)(stage)
    except Unavailable as error:
        noted(Figure(backend, name, BACKEND_FIGURE, None, FAILED, str(error)))
    except Exception as error:
        traceback.print_exc()
        noted(Figure(backend, name, "the section", None, FAILED, reason_of(error)))
    return is_right


def run_child(name: str, backend: str, model: str, target: Path | None, *, is_dry: bool) -> int:
    """Run one section in this process, a line of JSON per figure into `target` (none: standard output)."""

    def write(figure: Figure) -> None:
        if target is None:
            sys.stdout.write(figure.line() + "\n")
            sys.stdout.flush()
        else:
            with target.open("a") as file:
                file.write(figure.line() + "\n")

    return 0 if run_section(name, backend, model, write, is_dry=is_dry) else 1
