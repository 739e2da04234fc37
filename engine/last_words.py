"""Which policy an engine process was inside when it had to be stopped, or crashed.

Nothing in the process can say so where compiled code keeps the interpreter's lock; the interpreter's fault
handler prints where each thread is all the same, and this reads it among the lines the process prints.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.policy_guard import EvictionGuard, PolicyGuard, SchedulingGuard

_FRAME = re.compile(r'File ".*[/\\](policy_guard|policy_watchdog)\.py", line \d+ in ([\w.<>]+)$')
_GUARDS: tuple[type[PolicyGuard[Any]], ...] = (SchedulingGuard, EvictionGuard)
_KINDS = {
    method: guard.kind for guard in _GUARDS for method in vars(guard) if not method.startswith("_")
}


class LastWords:
    """Told each line that a process prints. A stack is printed from its deepest frame on."""

    def __init__(self) -> None:
        self._is_in_call = False
        self._kind = ""

    def note(self, line: str) -> None:
        frame = _FRAME.search(line)
        if frame is None:
            return
        module, function = frame[1], frame[2].rpartition(".")[2]
        if module == "policy_watchdog":
            self._is_in_call = function == "call"
        elif self._is_in_call and function in _KINDS:
            self._kind = _KINDS[function]
            self._is_in_call = False

    def take_kind(self) -> str:
        """Return the kind of policy the process was last seen inside, once; "" for none."""
        kind, self._kind, self._is_in_call = self._kind, "", False
        return kind
