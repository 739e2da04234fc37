"""Servers for the end-to-end tests: real processes, real sockets, loopback only."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

ServeScript = Callable[..., StartedServer]


@pytest.fixture
def serve_script(tmp_path: pathlib.Path) -> Iterator[ServeScript]:
    """Start `headrace serve --model scripted:FILE` with these pieces; ends with the test."""
    with ExitStack() as stack:

        def start(pieces: list[Any], *arguments: str, **settings: Any) -> StartedServer:
            path = write_script(tmp_path / "script.json", pieces, **settings)
            server: AbstractContextManager[StartedServer] = started_server(
                ["--model", f"scripted:{path}", *arguments]
            )
            return stack.enter_context(server)

        yield start


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    """One server for many tests: it says "Hello brave new world!" and ends."""
    path = tmp_path_factory.mktemp("script") / "hello.json"
    write_script(path, ["Hello", " brave", " new", " world", "!"])
    with started_server(["--model", f"scripted:{path}"]) as server:
        yield server
