"""Loading never holds a second full copy of the weights, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, pathlib, sys, threading
from headrace.backends.cpu.backend import CpuBackend
from headrace.clock import SystemClock
from headrace.group import SingleRank
from headrace.testing.model_driver import open_checkpoint
from headrace.types import EngineSettings

def anonymous_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    sizes = (status.split(f"{name}:")[1].split()[0] for name in ("RssAnon", "RssShmem"))
    return sum(int(size) for size in sizes) << 10

def watch():
    global peak
    while not loaded.wait(0.002):
        peak = max(peak, anonymous_bytes())

backend = CpuBackend.open(0, None, SystemClock())
model = open_checkpoint(pathlib.Path(sys.argv[1]))
settings = EngineSettings(dtype=sys.argv[2], kv_dtype=sys.argv[2], num_threads=2)
loaded, before = threading.Event(), anonymous_bytes()
peak = before
watcher = threading.Thread(target=watch)
watcher.start()
runner = backend.create_runner(model, SingleRank(), settings)
loaded.set()
watcher.join()
held = runner.memory().weight_bytes
print(json.dumps({"growth": max(peak, anonymous_bytes()) - before, "held": held}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("smollm2_gguf", "float32"), ("smollm2_gguf", "bfloat16"), ("gemma3_gguf", "bfloat16")],
)
def test_loading_grows_by_little_more_than_what_is_held(
    name: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["held"] > 80 << 20
    assert seen["growth"] <= 1.3 * seen["held"] + (64 << 20), seen
