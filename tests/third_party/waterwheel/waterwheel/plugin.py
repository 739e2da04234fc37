"""What the entry point names: the hooks."""

from __future__ import annotations

import headrace
from waterwheel.policy import Waterwheel


@headrace.hookimpl
def headrace_register_scheduling() -> list[type[Waterwheel]]:
    return [Waterwheel]
