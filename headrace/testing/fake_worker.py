"""An engine process without a model: the real worker around a FakeEngine.

Give `FAKE_WORKER` to a ProcessEngine as its command; its configuration is FakeEngine's arguments.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ModelError
from headrace.testing.fake_engine import FakeBuilt, build_fake
from headrace.worker import main

FAKE_WORKER = (sys.executable, "-P", "-m", "headrace.testing.fake_worker")


def build(replica: Mapping[str, Any], *, report: Callable[[str, float], None]) -> FakeBuilt:
    """Build a FakeEngine, or fail in the way that `replica` asks for.

    "deaf_load": loading never ends, and never lets another thread or a signal handler run.
    "refuse": the model cannot be served, for this reason. "exit": the process ends with this code.
    "load_seconds": loading takes this long. "marker": a file that must exist, or the process ends.
    """
    options = dict(replica)
    report("load", 0.0)
    time.sleep(options.pop("load_seconds", 0))
    if options.pop("deaf_load", False):
        re.match(r"(a+)+$", "a" * 100 + "b")  # exponential, inside one C call
    if "refuse" in options:
        raise ModelError(options["refuse"])
    marker = options.pop("marker", None)
    if "exit" in options or (marker is not None and not os.path.exists(marker)):
        print("last words", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(options.get("exit", 3))
    return build_fake(options, report=report)


if __name__ == "__main__":
    sys.exit(main(build=build))
