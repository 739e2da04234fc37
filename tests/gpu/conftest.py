"""Lets the longest jobs of the GPU kernels' proofs start first and be asked for last.

The sanitizers' jobs and the compilers run in processes of their own, beside the tests that simulate here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.machine_code import builds
from gpu.sanitized import MODES, endings

FOLDER = Path(__file__).parent
WAITING = FOLDER / "test_cuda_faults.py"
JUDGED = {FOLDER / "test_numba_quality.py": "numba", FOLDER / "test_cuda_quality.py": "cuda"}
LAST = (*JUDGED, WAITING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what waits for the jobs behind the other tests of this folder."""
    places = [place for place, item in enumerate(items) if item.path.parent == FOLDER]
    ordered = sorted((items[place] for place in places), key=_rank)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _rank(item: pytest.Item) -> int:
    return 1 + LAST.index(item.path) if item.path in LAST else 0


@pytest.fixture(scope="session", autouse=True)
def machine_code_beside_the_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the compilers before the first test of this folder, for all that will be asked."""
    wanted = []
    for item in request.session.items:
        kind = JUDGED.get(item.path)
        if kind is None or item.get_closest_marker("skip") or not isinstance(item, pytest.Function):
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if "architecture" in given:
            wanted.append((kind, str(given["name"]), str(given["architecture"])))
    if len(wanted) > 1:
        builds.start(wanted)
    yield
    builds.close()


@pytest.fixture(scope="session", autouse=True)
def jobs_beside_the_tests(request: pytest.FixtureRequest) -> None:
    """Start the jobs before the first test of this folder, where all of them are asked for."""
    asking = [
        item
        for item in request.session.items
        if item.path == WAITING and item.get_closest_marker("skip") is None
    ]
    if len(asking) == 2 * len(MODES) - 1:
        threading.Thread(target=_run_all, daemon=True).start()


def _run_all() -> None:
    with contextlib.suppress(Exception):  # the test that asks runs into the same and says so
        for mode in MODES:
            endings(mode)
