"""Fenced code blocks of the README and the docs, for the tests that run them."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    file: str
    line: int
    language: str
    text: str
    run: bool
    """A console block marked `<!-- run -->` on the line before it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def code_blocks(language: str, *, files: tuple[str, ...] = ()) -> list[CodeBlock]:
    """Return all blocks of a language, in the README and docs/ or in `files` only."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if files and name not in files:
            continue
        text = path.read_text()
        for match in FENCE.finditer(text):
            if match[1] == language:
                before = text[: match.start()]
                found.append(
                    CodeBlock(
                        file=name,
                        line=before.count("\n") + 1,
                        language=language,
                        text=match[2],
                        run=before.rstrip().endswith("<!-- run -->"),
                    )
                )
    return found
