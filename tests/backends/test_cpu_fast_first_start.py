"""What the first start ever compiles apart is what the step needs, and nothing depends on it."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.cpu.fast import first_start
from headrace.backends.cpu.fast.first_start import FirstStart
from headrace.backends.cpu.fast.kernels_attend_rows import CODES, PAIRS
from headrace.backends.cpu.fast.packing import UnsupportedModel
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.group import SingleRank
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that first starts have started: they sleep for a minute."""
    found: list[Any] = []
    real = subprocess.Popen

    def sleeping(command: list[str]) -> Any:
        found.append(real([sys.executable, "-c", "import time; time.sleep(60)"]))
        return found[-1]

    monkeypatch.setattr(first_start, "_is_there", lambda name: False)
    monkeypatch.setattr("subprocess.Popen", sleeping)
    return found


def test_what_is_compiled_apart_is_looked_for_under_the_name_that_it_is_kept_by(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model = open_checkpoint(tiny_checkpoint("llama"))
    runner = FastRunner(model, SingleRank(), EngineSettings(num_threads=1, max_model_len=256))
    runner.allocate(8)
    runner.close()
    first_start.compile_apart(PAIRS)
    assert [name for name in first_start.names(PAIRS) if not first_start._is_there(name)] == []


def test_a_warm_cache_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_is_there", lambda name: True)
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    start = FirstStart(CODES)
    start.close()


@pytest.mark.parametrize("command", ["/nowhere/python", "/bin/false"])
def test_a_process_that_fails_holds_nobody_up(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_start, "_is_there", lambda name: False)
    monkeypatch.setattr(sys, "executable", command)
    start = FirstStart(CODES)
    start.close()
    start.close()


def test_without_a_cache_there_is_nothing_to_compile_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "kernel_folder", lambda variant: None)
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    FirstStart(CODES).close()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_process_ends_with_the_runner_that_nobody_will_have(
    is_loaded: bool, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
) -> None:  # fmt: skip
    """A model that the fast path does not take, or a start that is given up before a step is compiled."""
    model = open_checkpoint(tiny_checkpoint("llama"))
    settings = EngineSettings(num_threads=1, max_model_len=256)
    begun = time.monotonic()
    if is_loaded:
        FastRunner(model, SingleRank(), settings).close()
    else:
        monkeypatch.setattr(type(model.architecture), "load", _refusing)
        with pytest.raises(UnsupportedModel):
            FastRunner(model, SingleRank(), settings)
    assert started[0].returncode is not None
    assert time.monotonic() - begun < 30


def test_a_process_ends_with_what_started_it(started: list[Any]) -> None:
    """Also where an error keeps everybody from saying so."""
    start = FirstStart(CODES)
    assert started[0].poll() is None
    del start
    gc.collect()
    assert started[0].returncode is not None


def test_an_interrupt_while_it_waits_leaves_a_process_that_can_still_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted:
        is_killed = False

        def wait(self, timeout: float | None = None) -> None:
            if not self.is_killed:
                raise KeyboardInterrupt

        def kill(self) -> None:
            self.is_killed = True

    process = Interrupted()
    monkeypatch.setattr(first_start, "_is_there", lambda name: False)
    monkeypatch.setattr("subprocess.Popen", lambda command: process)
    start = FirstStart(CODES)
    with pytest.raises(KeyboardInterrupt):
        start.close()
    start.give_up()
    assert process.is_killed


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_again_after_an_error(collects: bool) -> None:
    if not collects:
        gc.disable()
    try:
        with pytest.raises(MemoryError), first_start.uncollected():
            assert not gc.isenabled()
            raise MemoryError
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def _refusing(*arguments: Any) -> Any:
    raise UnsupportedModel("not this one")


def test_an_edit_of_what_kernels_are_made_of_names_their_folder_anew() -> None:
    """Whatever a kernel imports from this package is in the digest: the names that kernel_folder looks for."""
    package = "headrace.backends.cpu.fast"
    folder = Path(first_start.__file__).parent
    in_digest = {path.stem for path in folder.glob("[ckil]*.py")}
    for source in folder.glob("kernels_*.py"):
        found = re.findall(rf"^from {package}(?:\.(\w+))? import (\w+)", source.read_text(), re.M)
        assert {module or name for module, name in found} <= in_digest, source.name
