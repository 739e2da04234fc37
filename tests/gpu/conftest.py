"""Lets the longest jobs of the GPU kernels' proofs start first and be asked for last.

The sanitizers' jobs run in processes of their own, beside the tests that simulate and compile in this one.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from gpu.sanitized import MODES, endings

FOLDER = Path(__file__).parent
WAITING = FOLDER / "test_cuda_faults.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what waits for the jobs behind the other tests of this folder."""
    places = [place for place, item in enumerate(items) if item.path.parent == FOLDER]
    ordered = sorted((items[place] for place in places), key=lambda item: item.path == WAITING)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


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
