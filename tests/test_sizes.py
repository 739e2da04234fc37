"""No file and no function grows past what a reader takes in at once."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE_LINES, MAX_KERNEL_FILE_LINES, MAX_FUNCTION_LINES = 400, 600, 60
FOLDERS = (
    "headrace",
    "text",
    "gateway",
    "engine",
    "models",
    "backends",
    "policies",
    "plugins",
    "benchmarks",
    "scripts",
    "tests",
)


def files() -> list[pathlib.Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def is_kernel_file(file: pathlib.Path) -> bool:
    return file.name.startswith("kernels_") or file.parent.name == "kernels"


def test_there_are_files() -> None:
    assert len(files()) > 30


def test_files_are_short() -> None:
    wrong = []
    for file in files():
        limit = MAX_KERNEL_FILE_LINES if is_kernel_file(file) else MAX_FILE_LINES
        lines = len(file.read_text().splitlines())
        if lines > limit:
            wrong.append(f"{file.relative_to(ROOT)}: {lines} lines, at most {limit}")
    assert not wrong, "\n".join(wrong)


def test_functions_are_short() -> None:
    wrong = []
    for file in files():
        if is_kernel_file(file):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(
                        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"
                    )
    assert not wrong, "\n".join(wrong)
