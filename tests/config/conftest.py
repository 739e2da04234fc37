"""The command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from headrace.cli import main


@pytest.fixture
def headrace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command by its words; gives the exit code and what it printed on stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", *words])
        with pytest.raises(SystemExit) as left:
            main()
            sys.exit(0)
        printed = capsys.readouterr()
        code = left.value.code
        return code if isinstance(code, int) else 0, printed.out, printed.err

    return run
